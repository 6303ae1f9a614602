"""Responses of /v1/responses, whole or event by event: items are added, grow and are completed."""

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from fastapi.responses import StreamingResponse

from gateway.api.openai.answer_parser import AnswerParser, deltas_of
from gateway.api.openai.answer_types import ToolCallDelta
from gateway.api.openai.response_types import ResponseUsage
from gateway.api.openai.usage import has_metrics, metrics_body, usage_body
from gateway.errors import DEFECT, GatewayError
from gateway.generation.request import AnswerUsage, Chunk

logger = logging.getLogger(f"ray.serve.{__name__}")

Event = dict[str, Any]
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # type of the text, by type of the item


class ResponseAnswer:
    """Builds the events of one answer, and from them the whole response."""

    def __init__(
        self, model: str, parser: AnswerParser | None, seed: int, repeated: Mapping[str, Any]
    ) -> None:
        """
        Args:
            parser: parser of the answer; None: the answer is plain text.
            seed: seed that the caller gets.
            repeated: fields of the request that the response repeats.
        """
        self._parser = parser
        self._seed = seed
        self._items: list[dict[str, Any]] = []  # items of the output; the last item may be growing
        self._is_open = False
        self._call: int | None = None  # index of the growing call in the answer
        self._number = 0  # number of the next event
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": self._items,
            **repeated,
            "usage": None,
            "outrider": {"seed": seed},
        }

    def opening(self) -> Iterator[Event]:
        """Yields the events before the first token."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def chunk(self, chunk: Chunk) -> Iterator[Event]:
        """Yields the events of a chunk; the last chunk ends the response."""
        for delta in deltas_of(chunk, self._parser):
            if "tool_calls" in delta:
                yield from self._called(delta["tool_calls"][0])
            elif "reasoning_content" in delta:
                yield from self._said("reasoning", delta["reasoning_content"])
            elif delta["content"]:
                yield from self._said("message", delta["content"])
        if chunk.finish_reason is not None:
            status = "incomplete" if chunk.finish_reason == "length" else "completed"
            yield from self._done(status)
            self.response["status"] = status
            if status == "incomplete":
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            assert chunk.usage is not None
            self.response |= {"usage": self._usage(chunk.usage)}
            if has_metrics(chunk.usage):
                self.response |= {"metrics": metrics_body(chunk.usage)}
            if chunk.receipt is not None:
                self.response |= {"receipt": chunk.receipt}
            yield self._event(f"response.{status}", response=self.response)

    def failed(self, status: int, message: str) -> Event:
        """Returns the event that ends a failed response."""
        code = "server_error" if status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._event("response.failed", response=self.response)

    def _said(self, kind: str, text: str) -> Iterator[Event]:
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._opened(_message() if kind == "message" else _reasoning())
            yield self._event("response.content_part.added", **self._place(), part=dict(self._part()))
        self._part()["text"] += text
        yield self._event(f"response.{TEXTS[kind]}.delta", **self._place(), delta=text, **_logprobs(kind))

    def _called(self, call: ToolCallDelta) -> Iterator[Event]:
        if "id" in call:
            yield from self._opened(_function_call(call))
            self._call = call["index"]
        if not self._is_open or self._call != call["index"]:
            return
        delta = call["function"]["arguments"]
        if delta:
            self._items[-1]["arguments"] += delta
            place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
            yield self._event("response.function_call_arguments.delta", **place, delta=delta)

    def _opened(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._done("completed")
        self._items.append(item)
        self._is_open = True
        added = {**item, "content": []} if "content" in item else {**item}  # a copy: the item itself grows
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=added)

    def _done(self, status: str) -> Iterator[Event]:
        """Yields the events that end the growing item."""
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": len(self._items) - 1}
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **call)
        else:
            kind, part = item["type"], self._part()
            text = {"text": part["text"], **_logprobs(kind)}
            yield self._event(f"response.{TEXTS[kind]}.done", **self._place(), **text)
            yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._items[-1]["content"][0]
        return part

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        return {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _usage(self, usage: AnswerUsage) -> ResponseUsage:
        thought_tokens = 0 if self._parser is None else self._parser.thought_tokens
        body = usage_body(usage, self._seed, thought_tokens)
        return {
            "input_tokens": body["prompt_tokens"],
            "input_tokens_details": body["prompt_tokens_details"],
            "output_tokens": body["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought_tokens},
            "total_tokens": body["total_tokens"],
            "speculation": body["speculation"],
        }


class NamedAnswer(Protocol):
    """Answer whose events have names."""

    def opening(self) -> Iterator[Event]:
        """Yields the events before the first token."""

    def chunk(self, chunk: Chunk) -> Iterator[Event]:
        """Yields the events of a chunk."""

    def failed(self, status: int, message: str) -> Event:
        """Returns the event that ends a failed answer. status: HTTP status of the error."""


async def streamed(
    chunks: AsyncGenerator[Chunk, None],
    answer: NamedAnswer,
    headers: dict[str, str],
    keep: Callable[[], Awaitable[None]] | None = None,
) -> StreamingResponse:
    """Returns the answer as events, once it has its first chunk. keep: as for ``named_events``."""
    first = await anext(chunks)  # until the first chunk, an error can still set the status
    stream = named_events(first, chunks, answer, keep)
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def finished(chunks: AsyncGenerator[Chunk, None], answer: NamedAnswer) -> None:
    """Builds the whole answer."""
    async with aclosing(chunks):
        async for chunk in chunks:
            for _ in answer.chunk(chunk):
                pass


async def named_events(
    first: Chunk,
    chunks: AsyncGenerator[Chunk, None],
    answer: NamedAnswer,
    keep: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[str]:
    """Yields server-sent events, each with its name. If an error occurs, it is the last event.

    keep: stores the whole answer, before the caller can know that it is complete.
    """
    chunk = first
    async with aclosing(chunks):
        try:
            for event in answer.opening():
                yield written(event)
            while True:
                made = [*answer.chunk(chunk)]
                if chunk.usage is not None and keep is not None:
                    await keep()
                for event in made:
                    yield written(event)
                if chunk.usage is not None:
                    return
                chunk = await anext(chunks)
        except GatewayError as error:
            yield written(answer.failed(error.http_status, str(error)))
        except Exception:
            logger.exception("a stream of events failed")
            yield written(answer.failed(500, DEFECT))


def written(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _logprobs(kind: str) -> dict[str, Any]:
    """Returns the field that events of messages must have, though it is empty."""
    return {"logprobs": []} if kind == "message" else {}


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return _item("message", "msg") | {"role": "assistant", "content": [part]}


def _reasoning() -> dict[str, Any]:
    return _item("reasoning", "rs") | {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]}


def _function_call(call: ToolCallDelta) -> dict[str, Any]:
    named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
    return _item("function_call", "fc") | named


def _item(kind: str, prefix: str) -> dict[str, Any]:
    return {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
