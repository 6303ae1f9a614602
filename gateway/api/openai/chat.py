"""Bodies of /v1/chat/completions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from gateway.api.openai.answer_parser import AnswerParser
from gateway.api.openai.field_types import Label, Strict
from gateway.api.openai.fields import Ignored
from gateway.api.openai.messages import MAX_MESSAGES, Content, Message
from gateway.api.openai.rendering import CONTINUES, KWARGS, ChatPrompts, Rendered
from gateway.api.openai.response_template import CALLS, THINKING, marks, thoughts_before
from gateway.api.openai.schemas import GenerationRequest
from gateway.api.openai.tool_grammar import CallFormat
from gateway.api.openai.tools import MAX_TOOLS, NamedChoice, Tool
from gateway.errors import InvalidRequestError
from gateway.generation.form import Form
from gateway.generation.generation import Generation
from gateway.generation.request import Prepared, Request

EFFORT = "reasoning_effort"
MAX_KWARGS = 32  # arguments of a chat template


@dataclass(frozen=True)
class Chat:
    """Chat as the model reads it, and how its answer must be read."""

    prompt: Rendered
    tools: list[dict[str, Any]]
    response_template: dict[str, Any] | None
    most_calls: int | None  # tool calls in one answer
    form: Form | None  # form of an answer whose calls must be valid
    ends: frozenset[int]  # tokens that end a turn

    @property
    def _parsed_by(self) -> dict[str, Any] | None:
        """Response template that the parser needs; None: answers are mere text."""
        template = self.response_template
        if template is None or not (self.tools or any(name in template["fields"] for name in THINKING)):
            return None
        return template

    def shown(self, special_tokens: list[str]) -> frozenset[str]:
        """Returns the special tokens that the text must contain for the parser."""
        template = self._parsed_by
        return frozenset() if template is None else marks(template, special_tokens)

    def parser(self) -> AnswerParser | None:
        """Returns a parser for one answer; None if answers are mere text."""
        template = self._parsed_by
        if template is None:
            return None
        return AnswerParser(template, self.prompt.answer_start, self.tools, self.most_calls)


class Prediction(Strict):
    """What the answer probably says. It drafts the answer, and never changes it."""

    type: Literal["content"]
    content: Content


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[Label, Any] = Field(default_factory=dict, max_length=MAX_KWARGS)
    reasoning_effort: Label | None = None  # for templates that know it
    add_generation_prompt: bool = True  # unless the last message is continued
    continue_final_message: bool = False
    prediction: Prediction | None = None
    verbosity: Ignored = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that may be called, as templates and parsers take them."""
        return [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools]

    async def prepared(
        self,
        generation: Generation,
        chat: Chat,
        caller: str | None,
        deadline: float,
        *,
        fits: bool = False,
    ) -> Prepared:
        """Returns the prepared request. Raises as ``Generation.prepare`` does.

        fits: an answer longer than the context has room for is cut, and not refused.
        """
        try:
            request = await self._request(generation, chat, fits=fits)
            return await generation.prepare(request, caller, deadline)
        except InvalidRequestError as error:
            limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            own_names = {"prompt": "messages", "max_tokens": limit}
            raise type(error)(own_names.get(error.field, error.field), error.message) from error

    async def chat(self, prompts: ChatPrompts) -> Chat:
        """Returns the chat, rendered by the template.

        Raises:
            InvalidRequestError: the template refuses messages, leaves messages out, or does not know tools.
        """
        tools, more, template = self.offered, dict(self.chat_template_kwargs), prompts.template
        known = template.response_template
        form = None
        if tools:
            if not template.knows_tools:
                raise InvalidRequestError("tools", "the model's chat template knows none")
            if known is None or CALLS not in known["fields"]:
                raise InvalidRequestError(
                    "tools", "how the model writes calls is not known: its tokenizer has no response_template"
                )
            form = self._form(tools, known, prompts.added)
        elif self.tool_choice not in ("none", "auto"):
            raise InvalidRequestError("tool_choice", "needs tools")
        if self.reasoning_effort is not None:
            more.setdefault(EFFORT, self.reasoning_effort)
        begins = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and begins:
            raise InvalidRequestError(CONTINUES, "and add_generation_prompt cannot both be true")
        prompt = await prompts.rendered(
            self.messages,
            tools=tools,
            begin_answer=self.add_generation_prompt,
            continues=self.continue_final_message,
            more=more,
        )
        if EFFORT not in self.chat_template_kwargs:  # the request has it under its own name
            left_out = tuple(name.replace(f"{KWARGS}.{EFFORT}", EFFORT) for name in prompt.left_out)
            prompt = replace(prompt, left_out=left_out)
        return Chat(prompt, tools, known, None if self.parallel_tool_calls else 1, form, prompts.ends)

    def _form(
        self, tools: list[dict[str, Any]], template: dict[str, Any], added: Mapping[str, int]
    ) -> Form | None:
        """Returns the form of an answer that must call, or whose calls must follow a schema; None: any."""
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
            if not tools:
                raise InvalidRequestError("tool_choice.function.name", f"{name!r} is none of the tools")
            return CallFormat.of(template, added, "tool_choice").only_calls(tools, several=False)
        if self.tool_choice == "required":
            several = self.parallel_tool_calls
            return CallFormat.of(template, added, "tool_choice").only_calls(tools, several=several)
        if any(tool.function.strict for tool in self.tools):
            held = [tool.held() for tool in self.tools]
            return CallFormat.of(template, added, "tools").valid_calls(held)
        return None

    async def _request(self, generation: Generation, chat: Chat, *, fits: bool) -> Request:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        cuts = self.truncate_prompt_tokens
        prompt = await generation.chat_ids(chat.prompt.pieces, may_be_long=cuts is not None)
        prompt = generation.limits.truncated(prompt, cuts, self.max_tokens or 1)
        room = generation.limits.room(len(prompt))
        asked = self.max_tokens or room
        request = self.request(
            (prompt,),
            logprobs=self.top_logprobs if self.logprobs else None,
            max_tokens=min(asked, room) if fits else asked,
        )
        if self.tools and self.tool_choice != "none" and request.form is not None:
            raise InvalidRequestError("tools", "cannot be combined with a form of the answer")
        form = chat.form or request.form
        if form is not None:
            known = chat.response_template
            form = replace(
                form, thoughts=thoughts_before(known, chat.prompt.answer_start, generation.added_tokens)
            )
        return replace(
            request,
            ends=chat.ends,
            continues_text=False,
            shown=chat.shown(generation.special_tokens),
            form=form,
            prediction=None
            if self.prediction is None
            else "".join(part.text for part in self.prediction.content),
        )
