"""Bodies of /v1/chat/completions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from gateway.api.openai.answer_format import AnswerFormat, marks
from gateway.api.openai.answer_parser import AnswerParser
from gateway.api.openai.calls.grammar import CallGrammar
from gateway.api.openai.field_types import Ignored, Label
from gateway.api.openai.messages import MAX_MESSAGES, Message
from gateway.api.openai.rendering import CONTINUES, KWARGS, ChatPrompts, Rendered
from gateway.api.openai.schemas import GenerationRequest
from gateway.api.openai.tools import MAX_TOOLS, AllowedChoice, NamedChoice, Tool
from gateway.errors import InvalidRequestError
from gateway.generation.form import Form
from gateway.generation.generation import Generation
from gateway.generation.request import Prepared, Request

EFFORT = "reasoning_effort"
EFFORTS = (EFFORT, "thinking_effort")  # template variables that set how much a model thinks
THINKS = ("enable_thinking", "thinking")  # template variables that let a model think
UNKNOWN = (
    "how the model writes calls is not known: its chat template has no marks of a known family, and its"
    " tokenizer no response_template"
)
NOT_HELD = "calls cannot be held to a form, as this model writes them"
MAX_KWARGS = 32  # arguments of a chat template


@dataclass(frozen=True)
class Chat:
    """Chat as the model reads it, and how its answer must be parsed."""

    prompt: Rendered
    tools: list[dict[str, Any]]
    answers: AnswerFormat | None
    most_calls: int | None  # most tool calls in one answer; None: no limit
    shows_thoughts: bool
    form: Form | None  # form of an answer whose calls must be valid
    ends: frozenset[int]  # tokens that end a turn

    @property
    def _parsed_by(self) -> AnswerFormat | None:
        """Format that the parser needs; None: answers are plain text."""
        answers = self.answers
        return answers if answers is not None and (self.tools or answers.thoughts) else None

    def shown(self, special_tokens: list[str]) -> frozenset[str]:
        """Returns the special tokens that the text must contain for the parser."""
        answers = self._parsed_by
        return frozenset() if answers is None else marks(answers, special_tokens)

    def parser(self) -> AnswerParser | None:
        """Returns a parser for one answer; None if answers are plain text."""
        answers, prompt = self._parsed_by, self.prompt
        if answers is None:
            return None
        return AnswerParser(
            answers,
            prompt.answer_start,
            self.tools,
            self.most_calls,
            earlier_calls=prompt.calls,
            shows_thoughts=self.shows_thoughts,
        )


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[Label, Any] = Field(default_factory=dict, max_length=MAX_KWARGS)
    reasoning_effort: Label | None = None  # only for templates that read it
    include_reasoning: bool = True  # False: thoughts are left out of the answer
    add_generation_prompt: bool = True  # unless the last message is continued
    continue_final_message: bool = False
    verbosity: Ignored = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that may be called, in the form that templates and parsers accept."""
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
        """Returns the prepared request. Raises what ``Generation.prepare`` raises.

        fits: whether max_tokens is reduced to the room in the context; False: too many tokens are refused.
        """
        try:
            request = await self._request(generation, chat, fits=fits)
            return await generation.prepare(request, caller, deadline)
        except InvalidRequestError as error:
            limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            own_names = {"prompt": "messages", "max_tokens": limit}
            raise error.renamed(lambda field: own_names.get(field, field)) from error

    async def chat(self, prompts: ChatPrompts) -> Chat:
        """Returns the chat, rendered by the template.

        Raises:
            InvalidRequestError: the template refuses messages, leaves messages out, or does not know tools.
        """
        tools, template = self.offered, prompts.template
        more = {**self._effort(template.asks_for[bool(tools)]), **self.chat_template_kwargs}
        known = template.answers
        form = None
        if tools:
            if not template.knows_tools:
                raise InvalidRequestError("tools", "the model's chat template knows none")
            if known is None or not known.has_calls:
                raise InvalidRequestError("tools", UNKNOWN)
            form = self._form(tools, known, prompts.added)
        elif self.tool_choice not in ("none", "auto"):
            raise InvalidRequestError("tool_choice", "needs tools")
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
        if EFFORT not in self.chat_template_kwargs:  # the request has a field of its own for it
            left_out = tuple(name.replace(f"{KWARGS}.{EFFORT}", EFFORT) for name in prompt.left_out)
            prompt = replace(prompt, left_out=left_out)
        most_calls = None if self.parallel_tool_calls else 1
        return Chat(prompt, tools, known, most_calls, self.include_reasoning, form, prompts.ends)

    def _effort(self, variables: Collection[str]) -> dict[str, Any]:
        """Returns the template's variables for the effort; ``none`` switches thinking off."""
        if self.reasoning_effort is None:
            return {}
        if self.reasoning_effort == "none" and (switches := [name for name in THINKS if name in variables]):
            return dict.fromkeys(switches, False)
        return {next((name for name in EFFORTS if name in variables), EFFORT): self.reasoning_effort}

    def _form(
        self, tools: list[dict[str, Any]], answers: AnswerFormat, added: Mapping[str, int]
    ) -> Form | None:
        """Returns the form of an answer that must call a tool, or whose calls must follow a schema.

        None: any form.
        """

        def grammar(field: str) -> CallGrammar:
            if answers.calls is None:
                raise InvalidRequestError(field, NOT_HELD)
            return CallGrammar(answers.calls, added, field)

        several, form = self.parallel_tool_calls, self.asked_form
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
            if not tools:
                raise InvalidRequestError("tool_choice.function.name", f"{name!r} is none of the tools")
            return grammar("tool_choice").only_calls(tools, several=False)
        mode, field = self.tool_choice, "tools"
        held = [tool.held() for tool in self.tools]
        if isinstance(self.tool_choice, AllowedChoice):
            mode, field = self.tool_choice.allowed_tools.mode, "tool_choice"
            names = self.tool_choice.names([tool["function"]["name"] for tool in tools])
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            held = [tool for tool in held if tool["function"]["name"] in names]
        if mode == "required":
            return grammar("tool_choice").only_calls(tools, several=several)
        if form is not None:
            calls = grammar(form.field).only_calls(held, several=several)
            return replace(form, calls=calls.source)
        is_held = field == "tool_choice" or any(tool.function.strict for tool in self.tools)
        return grammar(field).valid_calls(held) if is_held else None

    async def _request(self, generation: Generation, chat: Chat, *, fits: bool) -> Request:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        cuts = self.truncate_prompt_tokens
        prompt = await generation.prompts.of_chat(chat.prompt.pieces, may_be_long=cuts is not None)
        prompt = generation.limits.truncated(prompt, cuts, self.max_tokens or 1)
        room = generation.limits.room(len(prompt))
        asked = self.max_tokens or room
        request = self.request(
            (prompt,),
            logprobs=self.top_logprobs if self.logprobs else None,
            max_tokens=min(asked, room) if fits else asked,
        )
        form, answers = chat.form or request.form, chat.answers
        if form is not None and answers is not None:
            start, added = chat.prompt.answer_start, generation.added_tokens
            form = answers.held(form, start, added, is_text=chat.form is None or bool(chat.form.calls))
        return replace(
            request,
            ends=chat.ends,
            continues_text=False,
            shown=chat.shown(generation.special_tokens),
            form=form,
        )
