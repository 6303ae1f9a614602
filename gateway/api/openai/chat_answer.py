"""Responses of /v1/chat/completions: whole, or as the events of a stream."""

import time
import uuid
from collections.abc import Sequence

from gateway.api.openai.answer_parser import deltas_of, joined
from gateway.api.openai.answer_types import (
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatEvent,
    ChatEventChoice,
    ChatLogprobs,
    ContentLogprob,
    FinishReason,
    PromptDetails,
    TokenLogprob,
)
from gateway.api.openai.chat import Chat, ChatRequest
from gateway.api.openai.schemas import finite
from gateway.api.openai.token_details import prompt_logprobs, shown_at_most, stop_reason, token_name
from gateway.api.openai.usage import final_usage
from gateway.generation.request import AnswerUsage, Chunk, Prepared
from gateway.generation.vocabulary import TokenBytes
from gateway.sequence import Token


class ChatAnswer:
    """Bodies of one answer: whole, or as the events of a stream."""

    def __init__(
        self, body: ChatRequest, prepared: Prepared, tokens: TokenBytes, seed: int, chat: Chat
    ) -> None:
        """seed: seed that the caller gets."""
        self._body = body
        self._prompt = prepared.sequences[0].prompt
        self.name = f"chatcmpl-{uuid.uuid4().hex}"
        self._frame: ChatEvent = {
            "id": self.name,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": prepared.model,
            "system_fingerprint": prepared.fingerprint,
            "choices": [],
        }
        self._tier = body.told_tier(prepared.priority)
        if "service_tier" in self._tier:
            self._frame["service_tier"] = self._tier["service_tier"]
        self._choices = len(prepared.sequences)
        self.seed = seed
        self._tokens = tokens
        self._parsers = [chat.parser() for _ in prepared.sequences]

    def opening(self) -> list[ChatEvent]:
        """Returns the events before the first chunk: the role, and the seed that repeats a broken stream."""
        delta: ChatDelta = {"role": "assistant", "content": ""}
        events = [self._event(_choice(index, delta, None)) for index in range(self._choices)]
        if self._body.return_token_ids:
            events[0]["prompt_token_ids"] = [*self._prompt]
        return [{**events[0], "outrider": {"seed": self.seed}}, *events[1:]]

    def chunk(self, chunk: Chunk) -> list[ChatEvent]:
        """Returns the events of a chunk; none if the chunk adds nothing yet."""
        logprobs = self._logprobs(chunk.tokens)
        deltas = self._deltas(chunk)
        ids = [token.id for token in chunk.tokens] if self._body.return_token_ids else []
        if not deltas and (ids or logprobs is not None or chunk.finish_reason is not None):
            deltas = [ChatDelta()]
        choices = [
            _choice(chunk.choice, delta, None if index else logprobs) for index, delta in enumerate(deltas)
        ]
        if choices:
            choices[-1]["finish_reason"] = self._finish_reason(chunk)
            choices[-1]["stop_reason"] = stop_reason(self._body, chunk)
            if ids:
                choices[0]["token_ids"] = ids
            if chunk.receipt is not None:
                choices[-1]["receipt"] = chunk.receipt
        return [self._event(choice) for choice in choices]

    def _deltas(self, chunk: Chunk) -> list[ChatDelta]:
        parser = self._parsers[chunk.choice]
        if parser is None and not chunk.text:
            return []
        deltas = deltas_of(chunk, parser)
        for delta in deltas:
            if "reasoning_content" in delta:
                delta["reasoning"] = delta["reasoning_content"]
        return deltas

    @property
    def _thought_tokens(self) -> int:
        return sum(parser.thought_tokens for parser in self._parsers if parser is not None)

    def _finish_reason(self, chunk: Chunk) -> FinishReason:
        parser = self._parsers[chunk.choice]
        calls = parser is not None and parser.calls > 0
        return "tool_calls" if calls and chunk.finish_reason == "stop" else chunk.finish_reason

    def wordless(self) -> ChatEvent:
        """Returns an event without a choice."""
        return self._event()

    def usage(self, usage: AnswerUsage) -> ChatEvent:
        """Returns the last event of a stream with include_usage, which has no choice."""
        return {**self._event(), **final_usage(usage, self.seed, self._thought_tokens)}

    def whole(self, chunks: Sequence[Chunk]) -> ChatCompletion:
        """Returns the body of an answer that is not streamed."""
        choices: list[ChatChoice] = []
        for index in range(self._choices):
            own = [chunk for chunk in chunks if chunk.choice == index]
            message = joined([delta for chunk in own for delta in self._deltas(chunk)])
            if "reasoning_content" in message:
                message["reasoning"] = message["reasoning_content"]
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            logprobs = self._logprobs([token for chunk in own for token in chunk.tokens])
            choice: ChatChoice = {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": self._finish_reason(own[-1]),
                "stop_reason": stop_reason(self._body, own[-1]),
            }
            if self._body.return_token_ids:
                choice["token_ids"] = [token.id for chunk in own for token in chunk.tokens]
            if (receipt := own[-1].receipt) is not None:
                choice["receipt"] = receipt
            choices.append(choice)
        usage = chunks[-1].usage
        assert usage is not None
        return {
            "id": self._frame["id"],
            "object": "chat.completion",
            "created": self._frame["created"],
            "model": self._frame["model"],
            "system_fingerprint": self._frame["system_fingerprint"],
            "choices": choices,
            **self._prompt_details(chunks),
            **self._tier,
            **final_usage(usage, self.seed, self._thought_tokens),
        }

    def _prompt_details(self, chunks: Sequence[Chunk]) -> PromptDetails:
        """Returns the details of the prompt that the request asks for; all choices share them."""
        details: PromptDetails = {}
        if self._body.return_token_ids:
            details["prompt_token_ids"] = [*self._prompt]
        if (most := self._body.prompt_logprobs) is not None:
            scores = [score for chunk in chunks if chunk.choice == 0 for score in chunk.scores]
            details["prompt_logprobs"] = prompt_logprobs(self._tokens, self._prompt, scores, most)
        return details

    def _event(self, *choices: ChatEventChoice) -> ChatEvent:
        return {**self._frame, "choices": list(choices)}

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        content: list[ContentLogprob] = []
        most = shown_at_most(self._body, self._body.top_logprobs)
        for token in tokens:
            if token.logprobs is None or not self._body.logprobs:
                return None
            pairs = zip(token.logprobs.token_ids[:most], token.logprobs.logprobs[:most], strict=True)
            top = [self._token(other, logprob) for other, logprob in pairs]
            content.append({**self._token(token.id, token.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None} if content else None

    def _token(self, token_id: int, logprob: float) -> TokenLogprob:
        return {
            "token": token_name(self._body, self._tokens, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokens.of(token_id)),
        }


def _choice(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None) -> ChatEventChoice:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": None,
        "stop_reason": None,
    }
