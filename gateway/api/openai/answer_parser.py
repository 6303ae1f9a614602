"""Streaming parser that splits the text of an answer into content, thoughts and tool calls."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway.api.openai.answer_format import CALLS, THINKING, AnswerFormat, with_raw_calls
from gateway.api.openai.answer_types import (
    CalledFunction,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from gateway.api.openai.calls.ids import new_id
from gateway.api.openai.calls.reader import Begun, CallReader
from gateway.generation.request import Chunk


class AnswerParser:
    """Turns text into deltas. Joined, they make the same message however the text was cut into pieces.

    Calls in a known format are streamed before they are complete. Calls in another format, which transformers
    parses, come when they are complete.
    """

    def __init__(
        self,
        answers: AnswerFormat,
        prefix: str,
        tools: Sequence[dict[str, Any]],
        most_calls: int | None,
        earlier_calls: int = 0,
        shows_thoughts: bool = True,
    ) -> None:
        """
        Args:
            answers: format of the model's answers.
            prefix: end of the prompt that already belongs to the answer, such as the mark of thinking.
            tools: tools that may be called; if empty, a call is plain text.
            most_calls: number of calls after which further calls are left out; None: no limit.
            earlier_calls: number of calls in the conversation so far.
            shows_thoughts: whether thoughts are a part of the message.
        """
        from transformers.utils.chat_parsing import ResponseParser  # takes a second, and only chats need it

        self._format = answers
        self._prefix = prefix
        self._tools = list(tools)
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self._tools
        }
        self._most_calls = most_calls
        self._earlier_calls = earlier_calls
        self._shows_thoughts = shows_thoughts
        self._parser = ResponseParser(with_raw_calls(answers.template), prefix=prefix)
        self._text = ""  # text of the answer so far
        self._region: str | None = None  # text between the marks of calls so far; None: outside
        self._reader: CallReader | None = None  # None: the format of calls is not known
        self._index: int | None = None  # index of the current call; None: the call is left out
        self._parsed = 0  # number of calls that were parsed
        begun = [event["type"] for event in self._parser.initial_events if event["field"] in THINKING]
        self._thinks = bool(begun) and begun[-1] != "region_close"
        self._undecided = 0  # number of newest tokens whose text may begin a mark
        # Newlines next to the marks of thoughts belong to the marks, unless the answer continues a text.
        self._is_at_mark = bool(answers.thoughts and prefix)
        self._ids: set[str] = set()  # ids of calls that the model wrote
        self.calls = 0  # number of tool calls that were returned
        self.thought_tokens = 0  # tokens of thoughts and of their marks

    def feed(self, pieces: Iterable[str], *, ends: bool) -> list[ChatDelta]:
        """Returns the deltas that are certain now.

        Args:
            pieces: text that each token adds.
            ends: whether no text follows.
        """
        events: list[dict[str, Any]] = []
        for event in self._events(pieces, ends=ends):
            last = events[-1] if events else {}
            if event["type"] == last.get("type") == "region_chunk" and event["field"] == last["field"]:
                events[-1]["text"] += event["text"]
            else:
                events.append(event)
        return [delta for event in events for delta in self._deltas(event)]

    def _events(self, pieces: Iterable[str], *, ends: bool) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            self._text += piece
            events = self._parser.feed(piece)
            self._count(events)
            yield from events
        if ends:
            yield from self._parser.finalize()[1]

    def _count(self, events: Sequence[dict[str, Any]]) -> None:
        """Counts a token if it belongs to thoughts, by the events that its text caused."""
        self._undecided += 1
        is_thought = self._thinks
        for event in events:
            if event["field"] in THINKING:
                is_thought, self._thinks = True, event["type"] != "region_close"
        if is_thought:
            self.thought_tokens += self._undecided
        if is_thought or events:
            self._undecided = 0

    def _deltas(self, event: dict[str, Any]) -> list[ChatDelta]:
        kind, field = event["type"], event["field"]
        if field == CALLS and self._tools:
            return self._of_calls(kind, event.get("text", ""))
        if kind == "region_close":
            self._is_at_mark = field in THINKING
        if kind != "region_chunk":
            return []
        text = event["text"]
        if field in THINKING:
            return [ChatDelta(reasoning_content=text)] if self._shows_thoughts else []
        if self._is_at_mark:
            text = text.lstrip("\n")
            self._is_at_mark = not text
        return [ChatDelta(content=text)] if text else []

    def _of_calls(self, kind: str, text: str) -> list[ChatDelta]:
        if self._region is None:
            self._region = ""
            written = self._format.calls
            self._reader = None if written is None else CallReader(written, self._schemas)
        self._region += text
        reader, closes = self._reader, kind == "region_close"
        if reader is None:
            deltas: list[ChatDelta] = []
        else:
            deltas = self._of_pieces([*reader.feed(text), *(reader.close() if closes else ())])
        if closes:
            if reader is None:
                deltas += self._read(self._region)
            elif reader.unread:
                deltas += self._read("" if reader.calls else self._region)
            self._region = None
        return deltas

    def _of_pieces(self, pieces: Iterable[Begun | str]) -> list[ChatDelta]:
        """Returns a delta for each call that begins or continues, with the new part of its arguments."""
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            if isinstance(piece, Begun):
                self._parsed += 1
                deltas += self._begin(piece)
            elif deltas and self._index == deltas[-1]["index"]:
                deltas[-1]["function"]["arguments"] += piece
            elif self._index is not None:
                deltas.append({"index": self._index, "function": {"arguments": piece}})
        return [{"tool_calls": [delta]} for delta in deltas]

    def _begin(self, call: Begun, arguments: str = "") -> list[ToolCallDelta]:
        if self.calls == self._most_calls:
            self._index = None
            return []
        self._index = self.calls
        self.calls += 1
        return [
            {
                "index": self._index,
                "id": self._id(call, self._earlier_calls + self._index),
                "type": "function",
                "function": FunctionDelta(name=_whole(call.name), arguments=arguments),
            }
        ]

    def _id(self, call: Begun, number: int) -> str:
        """Returns the id that the model wrote, or a new id if it wrote none or wrote the id before."""
        if call.id is not None and call.id not in self._ids:
            self._ids.add(call.id)
            return call.id
        return new_id("any" if self._format.calls is None else self._format.calls.ids, call.name, number)

    def _read(self, text: str) -> list[ChatDelta]:
        """Returns calls in another format, which transformers parses; unreadable calls stay text."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(
                self._text, self._format.template, prefix=self._prefix, tools=self._tools
            )
            calls = message[CALLS][self._parsed :]
            functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        except Exception:  # a model may write anything
            return [{"content": text}] if text else []
        self._parsed += len(calls)
        return [
            {"tool_calls": [delta]}
            for name, arguments in functions
            for delta in self._begin(Begun(str(name), None), _as_json(arguments))
        ]


def deltas_of(chunk: Chunk, parser: AnswerParser | None) -> list[ChatDelta]:
    """Returns the deltas of a chunk. parser: parser of its answer; None: the answer is plain text."""
    if parser is None:
        return [{"content": chunk.text}]
    return parser.feed(chunk.texts, ends=chunk.finish_reason is not None)


def _as_json(arguments: Any) -> str:
    return _whole(arguments) if isinstance(arguments, str) else json.dumps(arguments)


def _whole(text: str) -> str:
    """Returns the text with lone surrogates replaced: JSON can contain them, UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def joined(deltas: Sequence[ChatDelta]) -> ChatMessage:
    """Returns the message that the deltas make."""
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
