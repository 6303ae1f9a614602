"""Bodies of /v1/completions."""

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from gateway.api.openai.answer_types import (
    Completion,
    CompletionChoice,
    CompletionEvent,
    CompletionLogprobs,
)
from gateway.api.openai.field_types import checked_text
from gateway.api.openai.schemas import GenerationRequest, are_ids, finite
from gateway.api.openai.token_details import prompt_logprobs, shown_at_most, stop_reason, token_name
from gateway.api.openai.usage import final_usage
from gateway.errors import InvalidRequestError
from gateway.generation.generation import Generation
from gateway.generation.request import AnswerUsage, Chunk, Prepared, Prompt, Request
from gateway.generation.vocabulary import TokenBytes
from gateway.sequence import GatewaySequence
from protos.generation_pb2 import TokenLogprobs

LONG_ECHO = 128  # token ids; finding their places in the text takes about a millisecond


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Returns the prompts, given as a text, as token ids, or as a list of these. Raises ValueError."""
    several = isinstance(value, list) and value and not are_ids(value)
    return tuple(map(_prompt, value)) if several else (_prompt(value),)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return checked_text(value)
    if not isinstance(value, list) or not are_ids(value):
        raise ValueError("text, a list of token ids, or a list of such is accepted")
    return tuple(value)


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


@dataclass(frozen=True)
class Echo:
    """Echo of a prompt in its answers."""

    text: str
    token_ids: tuple[int, ...] = ()  # empty unless log-probabilities are wanted
    starts: tuple[int, ...] = ()  # offset of each token's text, characters


NO_ECHO = Echo("")


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool = False
    best_of: int | None = None  # must be n: no answer is better than another
    max_tokens: int = Field(default=16, ge=0, validate_default=True)  # 0: no answer, only the prompt

    def prepared(self) -> Request:
        """Returns the request. Raises InvalidRequestError if its fields contradict each other."""
        if self.best_of not in (None, self.n):
            raise InvalidRequestError("best_of", f"{self.best_of} is not accepted: n={self.n} is")
        is_echoed = self.echo and self.logprobs is not None
        if is_echoed and self.logprobs_of == "processed":
            raise InvalidRequestError("logprobs_of", "'raw' is accepted with echo: a prompt was not sampled")
        if self.max_tokens == 0 and self.max_completion_tokens is None:
            if not self.echo:
                raise InvalidRequestError("max_tokens", "0 is accepted with echo, else at least 1")
            if self.receipt:
                raise InvalidRequestError("receipt", "needs an answer: max_tokens of at least 1")
            request = replace(self.request(self.prompt, max_tokens=1), generates=False)
        else:
            request = self.request(self.prompt)
        return replace(request, scores_prompts=is_echoed or request.scores_prompts)

    async def echoes(self, prepared: Prepared, generation: Generation) -> list[Echo]:
        """Returns the text that precedes the answers, per prompt."""
        if not self.echo:
            return [NO_ECHO] * len(self.prompt)
        sequences = prepared.sequences[:: prepared.n]
        return [
            await _echo(
                generation,
                prompt,
                sequence,
                truncates=self.truncate_prompt_tokens is not None,
                shows_logprobs=self.logprobs is not None,
            )
            for prompt, sequence in zip(self.prompt, sequences, strict=True)
        ]


async def _echo(
    generation: Generation,
    prompt: Prompt,
    sequence: GatewaySequence,
    *,
    truncates: bool,
    shows_logprobs: bool,
) -> Echo:
    if isinstance(prompt, str) and not truncates:
        text = prompt
    else:
        text = await generation.tokenization.decode(sequence.prompt)
    if not shows_logprobs:
        return Echo(text)
    ids = sequence.prompt
    starts = partial(generation.token_starts, ids)
    return Echo(text, ids, await asyncio.to_thread(starts) if len(ids) > LONG_ECHO else starts())


class CompletionAnswer:
    """Bodies of one answer: whole, or as the events of a stream."""

    def __init__(
        self,
        body: CompletionRequest,
        prepared: Prepared,
        tokens: TokenBytes,
        seed: int,
        echoes: list[Echo],
    ) -> None:
        """
        Args:
            seed: seed that the caller gets.
            echoes: text before the choices, per prompt.
        """
        self._body = body
        self._prompts = [sequence.prompt for sequence in prepared.sequences]  # [choices]
        self._unsent = {*range(len(self._prompts))} if body.return_token_ids else set()
        self.name = f"cmpl-{uuid.uuid4().hex}"
        self._frame: CompletionEvent = {
            "id": self.name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": prepared.model,
            "system_fingerprint": prepared.fingerprint,
            "choices": [],
        }
        self._tier = body.told_tier(prepared.priority)
        if "service_tier" in self._tier:
            self._frame["service_tier"] = self._tier["service_tier"]
        self.seed = seed
        self._told_seed = False
        self._tokens = tokens
        self._echoes = [echo for echo in echoes for _ in range(prepared.n)]  # [choices]
        self._unscored = {choice for choice, echo in enumerate(self._echoes) if echo.token_ids}
        self._unsaid = {choice: echo.text for choice, echo in enumerate(self._echoes)}

    def opening(self) -> list[CompletionEvent]:
        """Returns no event: the first chunk begins the stream."""
        return []

    def chunk(self, chunk: Chunk) -> list[CompletionEvent]:
        """Returns the events of a chunk; none if the chunk adds nothing yet.

        The first event has the seed, with which a client can repeat a stream that broke.
        """
        logprobs = self._logprobs(chunk.choice, [chunk])
        text = self._unsaid.pop(chunk.choice, "") + chunk.text
        tells_ids = self._body.return_token_ids and chunk.tokens
        if not text and logprobs is None and chunk.finish_reason is None and not tells_ids:
            return []
        choice = self._choice(chunk.choice, text, logprobs, [chunk])
        if chunk.choice in self._unsent:
            self._unsent.remove(chunk.choice)
            choice["prompt_token_ids"] = [*self._prompts[chunk.choice]]
        body = self._event(choice)
        if not self._told_seed:
            self._told_seed = True
            body["outrider"] = {"seed": self.seed}
        return [body]

    def wordless(self) -> CompletionEvent:
        """Returns an event without a choice."""
        return self._event()

    def usage(self, usage: AnswerUsage) -> CompletionEvent:
        """Returns the last event of a stream with include_usage, which has no choice."""
        return {**self._event(), **final_usage(usage, self.seed)}

    def whole(self, chunks: Sequence[Chunk]) -> Completion:
        """Returns the body of an answer that is not streamed."""
        choices = []
        for index in range(len(self._echoes)):
            own = [chunk for chunk in chunks if chunk.choice == index]
            text = self._unsaid[index] + "".join(chunk.text for chunk in own)
            choice = self._choice(index, text, self._logprobs(index, own), own)
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = [*self._prompts[index]]
            if (most := self._body.prompt_logprobs) is not None:
                scores = [score for chunk in own for score in chunk.scores]
                choice["prompt_logprobs"] = prompt_logprobs(self._tokens, self._prompts[index], scores, most)
            choices.append(choice)
        usage = chunks[-1].usage
        assert usage is not None
        return {
            "id": self._frame["id"],
            "object": "text_completion",
            "created": self._frame["created"],
            "model": self._frame["model"],
            "system_fingerprint": self._frame["system_fingerprint"],
            "choices": choices,
            **self._tier,
            **final_usage(usage, self.seed),
        }

    def _event(self, *choices: CompletionChoice) -> CompletionEvent:
        return {**self._frame, "choices": list(choices)}

    def _choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, chunks: Sequence[Chunk]
    ) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": chunks[-1].finish_reason,
            "stop_reason": stop_reason(self._body, chunks[-1]),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for chunk in chunks for token in chunk.tokens]
        if (receipt := chunks[-1].receipt) is not None:
            choice["receipt"] = receipt
        return choice

    def _logprobs(self, choice: int, chunks: Iterable[Chunk]) -> CompletionLogprobs | None:
        """Returns log-probabilities of the answer and of an echoed prompt; None: not requested."""
        if self._body.logprobs is None:
            return None
        echo = self._echoes[choice]
        body: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for chunk in chunks:
            if choice in self._unscored:
                self._unscored.remove(choice)
                self._add(body, echo.token_ids[0], None, echo.starts[0])
            if chunk.scores and echo.token_ids:
                for scored in zip(echo.token_ids[1:], chunk.scores, echo.starts[1:], strict=True):
                    self._add(body, *scored)
            for token, piece in zip(chunk.tokens, chunk.pieces, strict=True):
                if token.logprobs is None:
                    return None
                self._add(body, token.id, token.logprobs, len(echo.text) + piece.start)
        return body if body["tokens"] else None

    def _add(
        self, body: CompletionLogprobs, token_id: int, logprobs: TokenLogprobs | None, start: int
    ) -> None:
        """Adds a token. logprobs: None for the first token of a prompt, which has none."""
        name, logprob, top = self._name(token_id), None, None
        if logprobs is not None:
            most = shown_at_most(self._body, self._body.logprobs)
            pairs = zip(logprobs.token_ids[:most], logprobs.logprobs[:most], strict=True)
            logprob = finite(logprobs.logprob)
            top = {self._name(other): finite(value) for other, value in pairs} | {name: logprob}
        body["tokens"].append(name)
        body["token_logprobs"].append(logprob)
        body["top_logprobs"].append(top)
        body["text_offset"].append(start)

    def _name(self, token_id: int) -> str:
        return token_name(self._body, self._tokens, token_id)
