"""The chat template of a tokenizer, rendered as transformers does but without it: it would bring torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.api.openai.response_template import of_chat_template
from gateway.errors import InvalidRequestError

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class AssistantText(Extension):
    """``{% generation %}``, by which templates mark for training what an assistant wrote: only read over."""

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
            source: the template's text; None if the model has none.
            special_tokens: by the names that templates know: bos_token, eos_token, ...
            with_tools: the template for chats that offer tools, if that is another.
            response_template: how the model writes its answers; None: as the chat template lets on.
        """
        self._special_tokens = special_tokens
        of_tools = with_tools or source
        self.response_template = response_template or (of_chat_template(of_tools) if of_tools else None)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, AssistantText]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = None if source is None else environment.from_string(source)
        self._with_tools = None if of_tools is None else environment.from_string(of_tools)
        named = set() if of_tools is None else find_undeclared_variables(environment.parse(of_tools))
        self.knows_tools = "tools" in named

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        begin_answer: bool = True,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text that the model is to go on from.

        Args:
            tools: that may be called.
            begin_answer: with its own turn begun.
            more: what else the template is told, by its own names.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise InvalidRequestError("messages", "this model has no chat template, ask /v1/completions")
        given = {"messages": messages, "add_generation_prompt": begin_answer, "documents": None}
        given |= {"tools": list(tools) or None, **self._special_tokens}
        if clash := sorted(given.keys() & more.keys()):
            raise InvalidRequestError(f"chat_template_kwargs.{clash[0]}", "is not the request's to set")
        template = self._with_tools if tools else self._template
        assert template is not None
        try:
            text = template.render(**given, **more)
            text.encode()  # JSON can spell half of a surrogate pair
            return text
        except TemplateError as error:
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way
            kind = type(error).__name__  # its message may repeat a prompt
            raise InvalidRequestError("messages", f"the model's chat template fails with {kind}") from error


def load_chat_template(source: str) -> ChatTemplate:
    """Of the tokenizer in a local folder, or of a hub id."""
    config = json.loads(_read(source, CONFIG) or "{}")
    template, with_tools = _read(source, TEMPLATE) or config.get("chat_template"), None
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template, with_tools = named.get("default"), named.get("tool_use")
    tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token") and value}
    return ChatTemplate(
        template,
        {name: text for name, text in tokens.items() if isinstance(text, str)},
        with_tools=with_tools,
        response_template=config.get("response_template"),
    )


def _read(source: str, name: str) -> str | None:
    folder = Path(source)
    if folder.is_dir():
        return (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name)).read_text(encoding="utf-8")
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return None


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


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
