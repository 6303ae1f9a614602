"""Parser that splits the text of an answer, as it comes, into content, thoughts and tool calls."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from gateway.api.openai.answer_types import (
    CalledFunction,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from gateway.api.openai.response_template import CALLS, THINKING, with_raw_calls

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class AnswerParser:
    """Turns text into deltas. Together they make the message, however the text was cut into pieces.

    Arguments in JSON come as they are written, before they are complete. Arguments in another format come
    when their call is complete.
    """

    def __init__(
        self, template: dict[str, Any], prefix: str, tools: Sequence[dict[str, Any]], most_calls: int | None
    ) -> None:
        """
        Args:
            template: the model's response template.
            prefix: end of the prompt that already belongs to the answer, such as the mark of thinking.
            tools: tools that may be called; if empty, a call is mere text.
            most_calls: further calls are left out; None: no limit.
        """
        from transformers.utils.chat_parsing import ResponseParser  # takes a second, and only chats need it

        self._template = template
        self._prefix = prefix
        self._tools = list(tools)
        self._most_calls = most_calls
        self._parser = ResponseParser(with_raw_calls(template), prefix=prefix)
        self._text = ""  # text of the answer so far
        self._call: _Call | None = None  # call that is being written
        self._parsed = 0  # calls that transformers has read
        self.calls = 0  # tool calls that were returned

    def feed(self, text: str, *, ends: bool) -> list[ChatDelta]:
        """Returns the deltas that are certain now. ends: no text follows."""
        self._text += text
        events = self._parser.feed(text)
        if ends:
            events += self._parser.finalize()[1]
        return [delta for event in events for delta in self._deltas(event)]

    def _deltas(self, event: dict[str, Any]) -> list[ChatDelta]:
        kind, field = event["type"], event["field"]
        if field == CALLS and self._tools:
            return self._of_call(kind, event.get("text", ""))
        if kind != "region_chunk":
            return []
        text = event["text"]
        return [ChatDelta(reasoning_content=text) if field in THINKING else ChatDelta(content=text)]

    def _of_call(self, kind: str, text: str) -> list[ChatDelta]:
        if self._call is None:
            self._call = _Call()
        call = self._call
        if kind == "region_chunk":
            name, arguments = call.feed(text)
            if name is not None:
                return self._first_delta(name, arguments, call)
            return self._continued(arguments, call) if arguments else []
        if kind != "region_close":
            return []
        self._call = None
        if call.is_known:
            self._parsed += 1
            return []
        return self._read(call.text)

    def _first_delta(self, name: str, arguments: str, call: "_Call") -> list[ChatDelta]:
        if self.calls == self._most_calls:
            return []
        call.index = self.calls
        self.calls += 1
        function = FunctionDelta(name=_whole(name), arguments=arguments)
        delta: ToolCallDelta = {
            "index": call.index,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": function,
        }
        return [{"tool_calls": [delta]}]

    def _continued(self, arguments: str, call: "_Call") -> list[ChatDelta]:
        if call.index is None:
            return []
        return [{"tool_calls": [{"index": call.index, "function": {"arguments": arguments}}]}]

    def _read(self, text: str) -> list[ChatDelta]:
        """Returns a call in another format, which transformers reads; an unreadable call stays text."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(self._text, self._template, prefix=self._prefix, tools=self._tools)
            calls = message[CALLS][self._parsed :]
            functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        except Exception:  # a model may write anything
            return [{"content": text}] if text else []
        self._parsed += len(calls)
        return [
            delta
            for name, arguments in functions
            for delta in self._first_delta(str(name), _as_json(arguments), _Call())
        ]


class _Call:
    """Call in JSON while it is written; its name comes first."""

    def __init__(self) -> None:
        self.text = ""
        self.index: int | None = None  # index among the returned calls
        self.is_known = False  # whether the name is known, so that arguments follow
        self._depth = 0
        self._in_string = self._is_escaped = self._is_over = False

    def feed(self, text: str) -> tuple[str | None, str]:
        """Returns the name, once, as soon as it is known; and new text of the arguments."""
        self.text += text
        if self.is_known:
            return None, self._arguments(text)
        head = HEAD.match(self.text)
        if head is None:
            return None, ""
        try:
            name = json.loads(head[1], strict=False)
        except ValueError:  # an escape that JSON does not have
            return None, ""
        self.is_known = True
        return name, self._arguments(self.text[head.end() :])

    def _arguments(self, text: str) -> str:
        """Returns the part of the text that belongs to the object of the arguments."""
        for place, char in enumerate(text):
            if self._is_over:
                return text[:place]
            if self._in_string:
                ends = char == '"' and not self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
                self._in_string = not ends
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self._is_over = self._depth == 0
        return text


def _as_json(arguments: Any) -> str:
    return _whole(arguments) if isinstance(arguments, str) else json.dumps(arguments)


def _whole(text: str) -> str:
    """Returns the text without halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def joined(deltas: Sequence[ChatDelta]) -> ChatMessage:
    """Returns the message that the deltas make together."""
    message: ChatMessage = {"role": "assistant", "refusal": None, "content": None}
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        if "content" in delta:
            message["content"] = (message["content"] or "") + delta["content"]
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for part in delta.get("tool_calls", ()):
            function = part["function"]
            if "id" in part:
                named = CalledFunction(name=function["name"], arguments=function["arguments"])
                calls[part["index"]] = ToolCall(id=part["id"], type="function", function=named)
            else:
                calls[part["index"]]["function"]["arguments"] += function["arguments"]
    return {**message, "tool_calls": [*calls.values()]} if calls else message
