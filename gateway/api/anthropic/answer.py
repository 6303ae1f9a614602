"""Responses of /v1/messages, whole or event by event: a series of blocks of text, thoughts and calls."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

from gateway.api.anthropic.errors import message_error
from gateway.api.anthropic.types import MessageTier, MessageUsage, StopReason
from gateway.api.openai.answer_parser import AnswerParser, deltas_of
from gateway.api.openai.answer_types import ToolCallDelta
from gateway.api.openai.response_events import Event
from gateway.api.openai.usage import usage_body
from gateway.generation.request import AnswerUsage, Chunk, Prepared

# Clients send thoughts back only with a signature, which is never verified.
SIGNATURE = "outrider"


class MessageAnswer:
    """Builds the events of one answer, and from them the whole message."""

    def __init__(
        self,
        parser: AnswerParser | None,
        prepared: Prepared,
        seed: int,
        context: int,
        tier: MessageTier | None,
        *,
        shows_thoughts: bool,
    ) -> None:
        """
        Args:
            parser: parser of the answer; None: the answer is plain text.
            seed: seed that the caller gets.
            context: context length of the target, tokens.
            tier: service tier for the answer; None: no tier.
        """
        self._parser = parser
        self._prepared = prepared
        self._seed = seed
        self._context = context
        self._tier = tier
        self._shows_thoughts = shows_thoughts
        self._blocks: list[dict[str, Any]] = []  # blocks of the message; the last block may be growing
        self._is_open = False
        self._call: int | None = None  # index of the growing call in the answer
        self._arguments = ""  # text of the growing call's arguments
        self._blank = ""  # whitespace that begins a block, held back until other text follows
        self._blank_kind = ""  # type of that block
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": prepared.model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def opening(self) -> Iterator[Event]:
        """Yields the events before the first token."""
        yield {"type": "message_start", "message": {**self.message, "usage": self._counts(0)}}
        yield {"type": "ping"}

    def chunk(self, chunk: Chunk) -> Iterator[Event]:
        """Yields the events of a chunk; the last chunk ends the message."""
        for delta in deltas_of(chunk, self._parser):
            if "tool_calls" in delta:
                yield from self._called(delta["tool_calls"][0])
            elif "reasoning_content" in delta:
                yield from self._said("thinking", delta["reasoning_content"])
            else:
                yield from self._said("text", delta["content"])
        if chunk.finish_reason is not None:
            assert chunk.usage is not None
            yield from self._done()
            stopped = {"stop_reason": self._stop_reason(chunk, chunk.usage), "stop_sequence": chunk.stop}
            usage = self._counts(chunk.usage.completion_tokens)
            usage["speculation"] = usage_body(chunk.usage, self._seed)["speculation"]
            self.message |= {**stopped, "usage": usage}
            yield {"type": "message_delta", "delta": stopped, "usage": usage}
            yield {"type": "message_stop"}

    def failed(self, status: int, message: str) -> Event:
        """Returns the event that ends a failed message."""
        return {**message_error(status, message)}

    def _said(self, kind: str, text: str) -> Iterator[Event]:
        """Yields the events of text or thoughts. Whitespace alone makes no block."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            text = self._blank + text if self._blank_kind == kind else text
            self._blank, self._blank_kind = text, kind
            if not text.strip():
                return
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._opened({"type": kind, kind: "", **signed})
        if kind == "thinking" and not self._shows_thoughts:
            return
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _called(self, call: ToolCallDelta) -> Iterator[Event]:
        if "id" in call:
            self._call, name = call["index"], call["function"]["name"]
            id_ = call["id"].replace("call_", "toolu_", 1)
            yield from self._opened({"type": "tool_use", "id": id_, "name": name, "input": {}})
        if not self._is_open or self._call != call["index"]:
            return
        if delta := call["function"]["arguments"]:
            self._arguments += delta
            yield self._delta({"type": "input_json_delta", "partial_json": delta})

    def _opened(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._done()
        self._blocks.append(block)
        self._is_open, self._blank = True, ""
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _done(self) -> Iterator[Event]:
        """Yields the events that end the growing block."""
        if not self._is_open:
            return
        block, self._is_open = self._blocks[-1], False
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        elif block["type"] == "tool_use":
            block["input"], self._arguments = _object(self._arguments), ""
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop_reason(self, chunk: Chunk, usage: AnswerUsage) -> StopReason:
        if chunk.finish_reason == "length":
            is_full = usage.prompt_tokens + usage.completion_tokens >= self._context
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if chunk.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._parser is not None and self._parser.calls else "end_turn"

    def _counts(self, output_tokens: int) -> MessageUsage:
        """Returns the token counts. This API counts cached tokens of the prompt separately."""
        cached = self._prepared.cached_tokens
        thought_tokens = 0 if self._parser is None else self._parser.thought_tokens
        counts: MessageUsage = {
            "input_tokens": self._prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
            "output_tokens_details": {"thinking_tokens": thought_tokens},
        }
        return counts if self._tier is None else {**counts, "service_tier": self._tier}


def _object(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; empty if they are incomplete or no JSON object."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
