"""Bodies of /v1/chat/completions."""

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.fields import Ignored
from gateway.api.openai.schemas import GenerationRequest, NullIsLeftOut, Text, finite, usage_bodies
from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation
from gateway.generation.request import Chunk, Prepared, Request, Usage
from gateway.generation.token_bytes import TokenBytes
from gateway.generation.tokenization import LONG_TEXT
from gateway.sequence import Token

MAX_MESSAGES, MAX_PARTS = 4096, 256  # of a chat, of a message


class TextPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"]
    text: Text


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), BeforeValidator(_as_parts)]
Nothing = Annotated[list[None], Field(max_length=0)]


class Message(NullIsLeftOut):
    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None
    # What else an answer may hold that is sent back.
    annotations: Nothing = Field(default_factory=list)
    tool_calls: Nothing = Field(default_factory=list)

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    prediction: Ignored = None
    verbosity: Ignored = None
    reasoning_effort: Ignored = None
    parallel_tool_calls: Ignored = None
    # Fields of OpenAI's that have one accepted meaning.
    tools: Nothing = Field(default_factory=list)
    tool_choice: Literal["none", "auto"] = "none"

    async def prepared(self, generation: Generation, template: ChatTemplate, caller: str | None) -> Prepared:
        """Raises as ``Generation.prepare`` does, and for messages that the template refuses."""
        try:
            return await generation.prepare(await self._request(generation, template), caller)
        except InvalidRequestError as error:
            limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            own_names = {"prompt": "messages", "max_tokens": limit}
            raise type(error)(own_names.get(error.field, error.field), error.message) from error

    async def _request(self, generation: Generation, template: ChatTemplate) -> Request:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        text = await rendered(template, self.messages)
        prompt = await generation.token_ids(text, add_special_tokens=False)
        request = self.request(
            (prompt,),
            logprobs=self.top_logprobs if self.logprobs else None,
            max_tokens=self.max_tokens or generation.room(len(prompt)),
        )
        return replace(request, continues_text=False)


async def rendered(template: ChatTemplate, messages: list[Message], *, begin_answer: bool = True) -> str:
    """The chat as the template writes it. Raises InvalidRequestError where that refuses it."""
    plain = [message.plain() for message in messages]
    render = partial(template.render, plain, begin_answer=begin_answer)
    is_long = len(plain) + sum(len(message["content"]) for message in plain) > LONG_TEXT
    return await asyncio.to_thread(render) if is_long else render()


class ChatAnswer:
    """The bodies of one answer; ``id``, time and model are the same in all of them."""

    def __init__(self, model: str, prepared: Prepared, tokens: TokenBytes, seed: int) -> None:
        """seed: as the caller is told of it."""
        self._frame = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._choices = len(prepared.sequences)
        self._seed = seed
        self._tokens = tokens

    def opening(self) -> list[dict[str, Any]]:
        """Before the first chunk: whose turn it is, and the seed to repeat a broken stream with."""
        delta = {"role": "assistant", "content": ""}
        said = [self._event(_choice(index, delta, None, None)) for index in range(self._choices)]
        return [{**said[0], "outrider": {"seed": self._seed}}, *said[1:]]

    def chunk(self, chunk: Chunk) -> dict[str, Any] | None:
        """One event of a stream; None where there is nothing to say yet."""
        logprobs = self._logprobs(chunk.tokens)
        if not chunk.text and logprobs is None and chunk.finish_reason is None:
            return None
        delta = {"content": chunk.text} if chunk.text else {}
        return self._event(_choice(chunk.choice, delta, logprobs, chunk.finish_reason))

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The extra last event of a stream that asked for it: no choice, only usage."""
        return {**self._event(), **usage_bodies(usage, self._seed)}

    def whole(self, chunks: Iterable[Chunk], count: int) -> dict[str, Any]:
        """The body of an answer that is not streamed; ``count`` choices."""
        chunks = list(chunks)
        choices = []
        for index in range(count):
            own = [chunk for chunk in chunks if chunk.choice == index]
            message = {"role": "assistant", "content": "".join(chunk.text for chunk in own), "refusal": None}
            logprobs = self._logprobs([token for chunk in own for token in chunk.tokens])
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": own[-1].finish_reason,
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
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
