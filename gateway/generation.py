"""The one entry that both APIs call: a request in, its answer out piece by piece."""

import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from decoding.noise_key import noise_key
from decoding.settings import Sampling
from gateway.errors import InvalidRequestError, UnknownModelError, WorkerLostError
from gateway.fleet import Fleet
from gateway.rounds import Record, Rounds
from gateway.sequence import Sequence
from gateway.settings import GatewaySettings, Speculation
from gateway.text import AnswerText

TOKEN_ID_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_token_ids")
DRAWN_SEED_BITS = 53  # such a seed survives JSON readers that keep numbers as doubles


@dataclass(frozen=True)
class Request:
    prompt: str | tuple[int, ...]  # text or token ids
    sampling: Sampling
    stop: tuple[str, ...] = ()
    speculation: Speculation = field(default_factory=Speculation)
    model: str | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation  # as resolved from request and settings
    record: Record


@dataclass(frozen=True)
class Chunk:
    token_ids: tuple[int, ...]
    text: str  # whole characters only, so it may lag behind token_ids
    finish_reason: str | None = None  # "stop" or "length", on the last chunk
    usage: Usage | None = None  # on the last chunk


@dataclass(frozen=True)
class Prepared:
    """A request that nothing is wrong with."""

    sequence: Sequence
    stop: tuple[str, ...]
    speculation: Speculation

    @property
    def seed(self) -> int:
        assert self.sequence.sampling.seed is not None
        return self.sequence.sampling.seed


class Generation:
    def __init__(self, settings: GatewaySettings, tokenizer: Tokenizer, fleet: Fleet) -> None:
        self.settings = settings
        self.fleet = fleet
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    def prepare(self, request: Request) -> Prepared:
        """Whatever can be refused is refused here, before anything reaches a worker.

        Raises:
            InvalidRequestError: naming the field.
            WorkerLostError: there is no target.
        """
        if request.model not in (None, self.settings.model):
            raise UnknownModelError("model", f"{request.model!r} is not served, {self.settings.model!r} is")
        if "" in request.stop:
            raise InvalidRequestError("stop", "a stop string must not be empty")
        if request.sampling.logprobs is not None:
            raise InvalidRequestError("logprobs", "not served yet, leave it out")
        prompt = self._token_ids(request.prompt)
        sampling = request.sampling
        for name in TOKEN_ID_FIELDS:
            self._check_ids(name, getattr(sampling, name) or ())
        if len(prompt) + sampling.max_tokens > self.max_length():
            raise InvalidRequestError(
                "max_tokens",
                f"{sampling.max_tokens} after a prompt of {len(prompt)} tokens exceeds the context of "
                f"{self.max_length()} tokens",
            )
        seed = secrets.randbits(DRAWN_SEED_BITS) if sampling.seed is None else sampling.seed
        return Prepared(
            Sequence(prompt, sampling.model_copy(update={"seed": seed}), noise_key(seed, 0, prompt)),
            request.stop,
            request.speculation.resolved(self.settings),
        )

    async def chunks(self, prepared: Prepared) -> AsyncGenerator[Chunk, None]:
        """The answer, one chunk per Verdict. Raises WorkerLostError if the target is lost on the way."""
        sequence = prepared.sequence
        rounds = Rounds(sequence, self.fleet, prepared.speculation, self.settings)
        text = AnswerText(self._tokenizer, prepared.stop)
        completion_tokens = 0
        async with aclosing(rounds.replies()) as replies:
            async for reply in replies:
                ends = bool(reply.finish_reason)
                kept, piece = text.add(reply.tokens, ends=ends)
                completion_tokens += kept
                if text.stopped:
                    sequence.finish_reason = "stop"
                if sequence.finish_reason is None:
                    yield Chunk(tuple(reply.tokens), piece)
                    continue
                usage = Usage(len(sequence.prompt), completion_tokens, prepared.speculation, rounds.record)
                yield Chunk(tuple(reply.tokens[:kept]), piece, sequence.finish_reason, usage)
                return

    def max_length(self) -> int:
        """Tokens of context that every target has. Raises WorkerLostError if there is no target."""
        lengths = [worker.max_length for worker in self.fleet.workers("target")]
        if not lengths:
            raise WorkerLostError("no target worker is ready")
        return min(lengths)

    def _token_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        token_ids = tuple(self._tokenizer.encode(prompt).ids) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise InvalidRequestError("prompt", "must hold at least one token")
        self._check_ids("prompt", token_ids)
        return token_ids

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise InvalidRequestError(field, f"token id {largest} must be below {self.vocab_size}")
