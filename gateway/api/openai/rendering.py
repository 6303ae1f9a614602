"""Renders chats, and checks that the template shows the caller's text."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from gateway.api.openai.answer_format import thinking_marks
from gateway.api.openai.calls.ids import count_calls, with_own_ids
from gateway.api.openai.chat_template import ChatTemplate, Role
from gateway.api.openai.marks import Marks, free_signs, raw
from gateway.api.openai.messages import Message
from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation
from gateway.generation.tokenization import LONG_TEXT

LEFT_OUT = "the model's chat template leaves it out, so the model would not see it"
CONTINUES = "continue_final_message"
CLOSED = "the model's chat template does not show the last message as it is, so it cannot be continued"
KWARGS = "chat_template_kwargs"
SEEN = 32  # characters of a text that are searched for if a template drops the text's number


@dataclass(frozen=True)
class Rendered:
    """Chat as rendered by its template."""

    pieces: tuple[str, ...]  # tokenized separately, so that no text of a caller becomes a mark
    answer_start: str  # beginning of the answer: text after the last message, or mark before its open text
    left_out: tuple[str, ...] = ()  # names of fields that the template does not render
    calls: int = 0  # calls in the conversation so far


class _Text(NamedTuple):
    name: str
    seen: tuple[str, ...]  # prefixes; any of them shows that the template has the text
    is_needed: bool


@dataclass
class _Numbered:
    """Texts of a caller in a chat, each followed by a number."""

    sign: str
    texts: list["_Text"] = field(default_factory=list)

    def of(self, text: str, name: str, *, is_needed: bool = True, or_shown: str = "") -> str:
        """Returns the text with its number before trailing space; a blank text is unchanged.

        or_shown: text that the template may render instead.
        """
        if not (words := text.rstrip()):
            return text
        seen = tuple(shown.strip()[:SEEN] for shown in (text, or_shown) if shown.strip())
        self.texts.append(_Text(name, seen, is_needed))
        return f"{words}{self.sign}{len(self.texts) - 1}{self.sign}{text[len(words) :]}"

    @property
    def number(self) -> re.Pattern[str]:
        return re.compile(f"{self.sign}(\\d+){self.sign}")


class ChatPrompts:
    """Renders chats into prompts."""

    def __init__(
        self,
        template: ChatTemplate,
        special_tokens: Sequence[str],
        added: Mapping[str, int],
        *,
        allow_special_tokens: bool = False,
    ) -> None:
        """
        Args:
            special_tokens: special tokens of the tokenizer.
            added: ids of all added tokens by their text. An added token that is not special counts as a mark
                if the template contains it: other such tokens are tags or runs of spaces.
            allow_special_tokens: whether text of callers may become special tokens.
        """
        self.template = template
        self.added = added
        calls = None if template.answers is None else template.answers.calls
        ends = {template.end_of_turn(added), None if calls is None else calls.stop}
        # A token that is not special is a part of the text, even at the end of a turn.
        self.ends = frozenset(added[end] for end in ends if end in special_tokens and end is not None)
        self._ids = "any" if calls is None else calls.ids
        self._before_text = "" if template.answers is None else template.answers.before_text
        named = {token for token in added if token.strip() and token in template.sources}
        marks = set() if allow_special_tokens else {*special_tokens, *named}
        self._marks = Marks(marks)
        # An assistant's content keeps the marks of thoughts, by which templates find the thoughts in it.
        self._marks_of_assistant = Marks(marks - thinking_marks(template.answers))

    @classmethod
    def of(cls, template: ChatTemplate, generation: Generation) -> "ChatPrompts":
        """Returns the renderer of a gateway's chats."""
        return cls(
            template,
            generation.special_tokens,
            generation.added_tokens,
            allow_special_tokens=generation.settings.special_tokens_in_messages,
        )

    async def rendered(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        begin_answer: bool = True,
        continues: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        """Returns the rendered chat.

        Args:
            begin_answer: whether the prompt ends with the beginning of the model's turn.
            continues: whether the prompt ends with the text of the last message, which the answer continues.

        Raises:
            InvalidRequestError: the template refuses the chat, or leaves a part out.
        """
        plain = with_own_ids([message.plain() for message in messages], self._ids)
        render = partial(self._rendered, plain, tools, begin_answer and not continues, continues, more)
        is_long = len(plain) + sum(len(text) for message in plain for text in message["content"]) > LONG_TEXT
        rendered = await asyncio.to_thread(render) if is_long or tools else render()
        return replace(rendered, calls=count_calls(plain))

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        begin_answer: bool,
        continues: bool,
        more: Mapping[str, Any],
    ) -> Rendered:
        if continues and not _is_open_text(messages[-1]):
            raise InvalidRequestError(
                CONTINUES, "needs a last message of the assistant, with text and no calls"
            )
        unread = tuple(f"{KWARGS}.{name}" for name in more.keys() - self.template.asks_for[bool(tools)])
        cut, sign = free_signs([messages, tools, dict(more)], 2)
        messages = [self._cut(message, cut) for message in messages]
        tools, more = self._marks.cut(tools, cut), self._marks.cut(dict(more), cut)

        def written(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
            known = self._with_known_roles(messages)
            shaped = [self._shaped(message, bool(tools)) for message in known]
            text = self.template.render(shaped, tools=tools, begin_answer=begin_answer, more=more)
            return raw(raw(text, cut), sign)

        text, numbered = written(messages, tools), _Numbered(sign)
        try:
            marked = written(*_with_numbers(messages, tools, numbered))
        except InvalidRequestError:  # the template depends on what the numbers changed
            if continues:
                raise InvalidRequestError(CONTINUES, CLOSED) from None
            return Rendered(_pieces(text, cut), text, unread)
        left_out = unread + _left_out(numbered, marked, text)
        if continues:
            words = messages[-1]["content"][-1]
            space = words[len(words.rstrip()) :]
            opened = _pieces(_opened(numbered, marked, text, space), cut)
            return Rendered(opened, self._before_text, left_out)
        *_, answer_start = numbered.number.split(marked)
        return Rendered(_pieces(text, cut), answer_start if text.endswith(answer_start) else text, left_out)

    def _cut(self, message: dict[str, Any], cut: str) -> dict[str, Any]:
        result: dict[str, Any] = self._marks.cut(message, cut)
        if message["role"] == "assistant":
            result["content"] = self._marks_of_assistant.cut(message["content"], cut)
        return result

    def _shaped(self, message: dict[str, Any], with_tools: bool) -> dict[str, Any]:
        """Returns the message in a form that the template accepts."""
        role: Role = message["role"]
        shaped = {
            **message,
            "content": self.template.content(role, message["content"], with_tools=with_tools),
        }
        calls = shaped.get("tool_calls", ())
        if calls and not self.template.takes_text_arguments:
            shaped["tool_calls"] = [_with_object(call) for call in calls]
        if "reasoning_content" in shaped:
            thoughts, names = shaped.pop("reasoning_content"), self.template.thought_names
            # Only the template of gpt-oss uses this name alone, and it refuses thoughts next to both words
            # and calls.
            if names != ["thinking"] or not (calls and any(message["content"])):
                shaped |= dict.fromkeys(names, thoughts)
        return shaped

    def _with_known_roles(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages, with the role system for developers if the template lacks the role developer.

        A developer's message after the system message becomes a part of it: most templates accept only one
        system message.
        """
        known: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] != "developer" or self.template.knows_developer:
                known.append(message)
            elif known and known[-1]["role"] == "system":
                known[-1] = {**known[-1], "content": [*known[-1]["content"], *message["content"]]}
            else:
                known.append({**message, "role": "system"})
        return known


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Returns the call with its arguments as an object."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _with_numbers(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], numbered: _Numbered
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    offered = []
    for index, tool in enumerate(tools):
        function = {**tool["function"], "name": numbered.of(tool["function"]["name"], f"tools.{index}")}
        offered.append({**tool, "function": function})
    return [
        _message_with_numbers(message, f"messages.{at}", numbered) for at, message in enumerate(messages)
    ], offered


def _message_with_numbers(message: dict[str, Any], name: str, numbered: _Numbered) -> dict[str, Any]:
    """Returns the message with numbers after its texts.

    Many templates leave out an assistant's name, thoughts, and words next to calls, because their models were
    trained so. That is only reported to the caller. Calls and all other words are needed.
    """
    is_needed = message["role"] != "assistant"
    marked = dict(message)
    if "reasoning_content" in message:
        thoughts = message["reasoning_content"]
        marked["reasoning_content"] = numbered.of(thoughts, f"{name}.reasoning_content", is_needed=False)
    if message["role"] != "tool" and "name" in message:
        marked["name"] = numbered.of(message["name"], f"{name}.name", is_needed=False)
    several = len(message["content"]) > 1
    marked["content"] = [
        numbered.of(text, f"{name}.content" + (f".{index}" if several else ""), is_needed=is_needed)
        for index, text in enumerate(message["content"])
    ]
    if "tool_calls" in message:
        marked["tool_calls"] = []
        for index, call in enumerate(message["tool_calls"]):
            function, at = call["function"], f"{name}.tool_calls.{index}"
            # Some templates write only the id of a call, which contains the name.
            called = {**function, "name": numbered.of(function["name"], at, or_shown=call["id"])}
            marked["tool_calls"].append({**call, "function": called})
    return marked


def _left_out(numbered: _Numbered, marked: str, text: str) -> tuple[str, ...]:
    """Returns the names of texts that are not rendered. Raises InvalidRequestError for a needed text."""
    shown = {int(found[1]) for found in numbered.number.finditer(marked)}
    missing = [
        each
        for number, each in enumerate(numbered.texts)
        if number not in shown and not any(begin in text for begin in each.seen)
    ]
    for each in missing:
        if each.is_needed:
            raise InvalidRequestError(each.name, LEFT_OUT)
    return tuple(each.name for each in missing)


def _is_open_text(message: dict[str, Any]) -> bool:
    """Returns whether an answer can continue the text of a message."""
    texts = message["content"]
    return (
        message["role"] == "assistant" and bool(texts and texts[-1].strip()) and not message.get("tool_calls")
    )


def _opened(numbered: _Numbered, marked: str, text: str, space: str) -> str:
    """Returns the chat up to the end of its last message's text, which has the highest number.

    space: whitespace at the end of that text; a template may leave it out.

    Raises:
        InvalidRequestError: the template does not render that text unchanged.
    """
    *_, last = [None, *numbered.number.finditer(marked)]
    if last is not None and int(last[1]) == len(numbered.texts) - 1:
        opened = numbered.number.sub("", marked[: last.start()])
        if text.startswith(opened):
            return opened + space if text.startswith(opened + space) else opened
    raise InvalidRequestError(CONTINUES, CLOSED)


def _pieces(text: str, cut: str) -> tuple[str, ...]:
    return tuple(piece for piece in text.split(cut) if piece)
