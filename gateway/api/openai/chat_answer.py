"""Answers of /v1/chat/completions: whole, or as the events of a stream."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.api.openai.answer_parser import joined
from gateway.api.openai.chat import Chat
from gateway.api.openai.schemas import finite, usage_bodies
from gateway.generation.request import Chunk, Prepared, Usage
from gateway.generation.token_bytes import TokenBytes
from gateway.sequence import Token


class ChatAnswer:
    """The bodies of one answer; ``id``, time and model are the same in all of them."""

    def __init__(self, model: str, prepared: Prepared, tokens: TokenBytes, seed: int, chat: Chat) -> None:
        """seed: as the caller is told of it."""
        self._frame = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._choices = len(prepared.sequences)
        self._seed = seed
        self._tokens = tokens
        self._parsers = [chat.parser() for _ in prepared.sequences]

    def opening(self) -> list[dict[str, Any]]:
        """Before the first chunk: whose turn it is, and the seed to repeat a broken stream with."""
        delta = {"role": "assistant", "content": ""}
        said = [self._event(_choice(index, delta, None, None)) for index in range(self._choices)]
        return [{**said[0], "outrider": {"seed": self._seed}}, *said[1:]]

    def chunk(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Events of a stream; none where there is nothing to say yet."""
        logprobs = self._logprobs(chunk.tokens)
        deltas = self._deltas(chunk)
        if not deltas and (logprobs is not None or chunk.finish_reason is not None):
            deltas = [{}]
        finish = self._finish_reason(chunk)
        last = len(deltas) - 1
        return [
            self._event(
                _choice(chunk.choice, delta, None if index else logprobs, finish if index == last else None)
            )
            for index, delta in enumerate(deltas)
        ]

    def _deltas(self, chunk: Chunk) -> list[dict[str, Any]]:
        parser = self._parsers[chunk.choice]
        if parser is None:
            return [{"content": chunk.text}] if chunk.text else []
        return parser.feed(chunk.text, ends=chunk.finish_reason is not None)

    def _finish_reason(self, chunk: Chunk) -> str | None:
        parser = self._parsers[chunk.choice]
        calls = parser is not None and parser.calls > 0
        return "tool_calls" if calls and chunk.finish_reason == "stop" else chunk.finish_reason

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The extra last event of a stream that asked for it: no choice, only usage."""
        return {**self._event(), **usage_bodies(usage, self._seed)}

    def whole(self, chunks: Iterable[Chunk], count: int) -> dict[str, Any]:
        """The body of an answer that is not streamed; ``count`` choices."""
        chunks = list(chunks)
        choices = []
        for index in range(count):
            own = [chunk for chunk in chunks if chunk.choice == index]
            said = joined([delta for chunk in own for delta in self._deltas(chunk)])
            if said["content"] is None and "tool_calls" not in said:
                said["content"] = ""
            message = {"role": "assistant", "refusal": None, **said}
            logprobs = self._logprobs([token for chunk in own for token in chunk.tokens])
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": self._finish_reason(own[-1]),
                }
            )
        usage = chunks[-1].usage
        assert usage is not None
        return {
            **self._frame,
            "object": "chat.completion",
            "choices": choices,
            **usage_bodies(usage, self._seed),
        }

    def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._frame, "object": "chat.completion.chunk", "choices": list(choices)}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        content = []
        for token in tokens:
            if token.logprobs is None:
                return None
            pairs = zip(token.logprobs.token_ids, token.logprobs.logprobs, strict=True)
            top = [self._token(other, logprob) for other, logprob in pairs]
            content.append({**self._token(token.id, token.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None} if content else None

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokens.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokens.of(token_id)),
        }


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
