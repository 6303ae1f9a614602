"""Chat template of a tokenizer, rendered as transformers does, but without importing it and torch."""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.api.openai.answer_format import THINKING, AnswerFormat, of_chat_template, of_template
from gateway.errors import InvalidRequestError
from outrider.decoding.checkpoint_files import TOKENIZER_CONFIG, read, read_json, special_tokens

TEMPLATE, OF_TOOLS = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
OF_PROCESSOR = "chat_template.json"  # file of models that also accept images

logger = logging.getLogger(f"ray.serve.{__name__}")

Role = Literal["system", "developer", "user", "assistant", "tool"]
DEVELOPER = re.compile(r"""["']developer["']""")
WRITTEN_OUT = re.compile(r"""["']type["']:\s*["']text["']""")  # a list of parts, printed as it is
# Texts of probes, which show whether a template accepts a content as text, and as a list of parts.
TRIED = ("first word", "second word")
# Arguments of probes, which show whether a template accepts them as text and prints them unchanged.
ARGUMENTS = '{"key":  "value"}'
CALL = {"id": "call00001", "type": "function", "function": {"name": "try", "arguments": {}}}
BARE_TOOL = {"type": "function", "function": {"name": "try", "parameters": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "try", "description": "", "parameters": {"type": "object"}}}


class AssistantText(Extension):
    """Block ``{% generation %}``, which marks an assistant's words in templates for training; a no-op."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(
        self,
        source: str | None,
        special_tokens: dict[str, str],
        *,
        with_tools: str | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            source: the template's text; None if the model has no template.
            special_tokens: tokens by the names that templates use: bos_token, eos_token, ...
            with_tools: the template for chats that offer tools; None: source.
            response_template: format of the model's answers; None: derived from the chat template.
        """
        self._special_tokens = special_tokens
        of_tools = with_tools or source
        self.answers: AnswerFormat | None = None
        if response_template:
            self.answers = of_template(response_template)
        elif of_tools:
            self.answers = of_chat_template(of_tools)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, AssistantText]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = None if source is None else environment.from_string(source)
        self._with_tools = None if of_tools is None else environment.from_string(of_tools)
        self.sources = f"{source or ''}{with_tools or ''}"
        # Variables that the template reads; key: whether a chat offers tools.
        self.asks_for = {
            with_tools: find_undeclared_variables(environment.parse(text or ""))
            for with_tools, text in ((False, source), (True, of_tools))
        }
        self.knows_tools = "tools" in self.asks_for[True]
        # Templates that do not name the role developer are older than the role: they use system instead.
        self.knows_developer = bool(DEVELOPER.search(self.sources))
        named = self.asks_for[False] - special_tokens.keys()
        for name in sorted(name for name in named if name.endswith("_token")):
            logger.warning("the chat template writes %s, which no file of the tokenizer gives: empty", name)
        self._takes: dict[tuple[Role, bool], tuple[bool, bool]] = {}
        read = [name for name in THINKING if re.search(rf"""(\.|\[?["']){name}\b""", self.sources)]
        self.thought_names = read or [THINKING[0]]

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        begin_answer: bool = True,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the text that the model continues.

        Args:
            tools: tools that may be called.
            begin_answer: whether the text ends with the beginning of the model's turn.
            more: further variables of the template.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise InvalidRequestError("messages", "this model has no chat template, ask /v1/completions")
        given = {"messages": messages, "add_generation_prompt": begin_answer, "documents": None}
        given |= {"tools": self._described(tools) or None, **self._special_tokens}
        if clash := sorted(given.keys() & more.keys()):
            raise InvalidRequestError(f"chat_template_kwargs.{clash[0]}", "is not the request's to set")
        template = self._with_tools if tools else self._template
        assert template is not None
        try:
            text = template.render(**given, **more)
            text.encode()  # raises for lone surrogates, which JSON can contain
            return text
        except TemplateError as error:
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way
            kind = type(error).__name__  # the error's message may repeat a prompt
            raise InvalidRequestError("messages", f"the model's chat template fails with {kind}") from error

    def content(self, role: Role, texts: Sequence[str], *, with_tools: bool) -> str | list[dict[str, str]]:
        """Returns a message's text parts in a form that the template accepts.

        That is a list if the template reads lists, else a text with a line per part, as in vLLM.
        """
        key = role, with_tools
        if key not in self._takes:
            self._takes[key] = self._tried(role, with_tools)
        takes_text, takes_parts = self._takes[key]
        if takes_parts and (len(texts) > 1 or not takes_text):
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the template prints the arguments of a call unchanged if they are JSON text."""
        shown = [self._with_call(arguments) for arguments in (ARGUMENTS, json.loads(ARGUMENTS))]
        is_json = not shown[1] or json.dumps(json.loads(ARGUMENTS)) in shown[1]
        return ARGUMENTS in shown[0] and is_json

    def _with_call(self, arguments: Any) -> str:
        """Returns a rendered chat with a call of these arguments; empty if the template refuses it."""
        call = {**CALL, "function": {"name": "try", "arguments": arguments}}
        return self._shown(
            [*_chat_with("user", "x"), {"role": "assistant", "content": "", "tool_calls": [call]}], TOOL
        )

    def _described(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the tools as the template accepts them: many templates fail without a description."""
        if not tools or self._takes_bare_tools:
            return [*tools]
        functions = [tool["function"] for tool in tools]
        described = [{"name": each["name"], "description": "", **each} for each in functions]
        return [{**tool, "function": each} for tool, each in zip(tools, described, strict=True)]

    @cached_property
    def _takes_bare_tools(self) -> bool:
        """Whether the template accepts a tool that has no description."""
        assert self._with_tools is not None
        try:
            given = {"messages": _chat_with("user", "x"), "tools": [BARE_TOOL], **self._special_tokens}
            self._with_tools.render(**given, add_generation_prompt=False, documents=None)
        except Exception:  # a template is a program: it can fail in any way
            return False
        return True

    def _shown(self, chat: list[dict[str, Any]], *tools: dict[str, Any]) -> str:
        """Returns the rendered chat; empty if the template refuses it."""
        try:
            return self.render(chat, tools=tools, begin_answer=False)
        except InvalidRequestError:
            return ""

    def end_of_turn(self, added: Collection[str]) -> str | None:
        """Returns the token that the template writes after an assistant's words; None if there is none.

        added: texts of the tokenizer's added tokens.
        """
        text = self._shown(_chat_with("assistant", TRIED[0]))
        behind = text.rpartition(TRIED[0])[2].lstrip()
        if self.answers is not None and self.answers.calls is not None:
            behind = behind.removeprefix(self.answers.calls.after_text)
        return max((token for token in added if token and behind.startswith(token)), key=len, default=None)

    def _tried(self, role: Role, with_tools: bool) -> tuple[bool, bool]:
        """Returns whether the template renders a text, and whether it renders the parts of a list.

        The parts must be rendered without markup.
        """
        tools = (TOOL,) if with_tools else ()
        parts = [{"type": "text", "text": text} for text in TRIED]
        rendered = [self._shown(_chat_with(role, content), *tools) for content in (TRIED[0], parts)]
        is_read = all(text in rendered[1] for text in TRIED) and not WRITTEN_OUT.search(rendered[1])
        return TRIED[0] in rendered[0], is_read


def _chat_with(role: Role, content: Any) -> list[dict[str, Any]]:
    """Returns a chat with a message of this role and content, and the messages that it needs around it."""
    asked, message = {"role": "user", "content": "x"}, {"role": role, "content": content}
    match role:
        case "system" | "developer":
            return [message, asked]
        case "assistant":
            return [asked, message]
        case "tool":
            called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            return [asked, called, {**message, "name": "try", "tool_call_id": CALL["id"]}]
    return [message]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def load_chat_template(source: str) -> ChatTemplate:
    """Returns the chat template of a tokenizer in a local folder or of a hub id, as transformers finds it."""
    config = read_json(source, TOKENIZER_CONFIG)
    template, with_tools = read(source, TEMPLATE) or config.get("chat_template"), None
    if isinstance(template, list):  # several templates, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template, with_tools = named.get("default"), named.get("tool_use")
    return ChatTemplate(
        template or read_json(source, OF_PROCESSOR).get("chat_template"),
        special_tokens(source),
        with_tools=read(source, OF_TOOLS) or with_tools,
        response_template=config.get("response_template"),
    )
