"""An answer as far as it has come, and how a reading goes on when its stream breaks.

Nothing here sends or waits: both clients do that, by the same rules.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.client.errors import ServiceOverloadedError, ServiceUnavailableError, error_of
from outrider.learning.backoff import Backoff
from protos import generation_pb2

PAUSE = Backoff(0.2, 3.0)  # seconds between attempts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerPiece:
    """Token, and the text that is certain with it."""

    text: str
    token_id: int
    # "accepted": drafted and confirmed; "target": the target's own after a Draft; "plain"; "forced"
    origin: str


class AnswerSoFar:
    """Pieces of an answer that have come; after the last of them its finish reason and usage."""

    def __init__(
        self,
        open_call: Callable[[generation_pb2.GenerateRequest], Any],
        request: generation_pb2.GenerateRequest,
        patience_s: float,
    ) -> None:
        """open_call: sends a request, and returns gRPC's call."""
        self._open_call = open_call
        self._request = request
        self._patience_s = patience_s
        self.pieces: list[AnswerPiece] = []
        self.seed: int | None = None  # seed that gives this answer again
        self.finish_reason: str | None = None  # "stop" or "length"
        self.usage: generation_pb2.Usage | None = None
        self.repeats = 0  # times that the request was sent again

    @property
    def text(self) -> str:
        """Text of the pieces that have come."""
        return "".join(piece.text for piece in self.pieces)

    def reading(self) -> "AnswerReading":
        """Returns a reading from the first piece on."""
        return AnswerReading(self, self._request, self._patience_s)


class AnswerReading:
    """One way through an answer, over as many attempts as it takes.

    Each attempt asks for the seed that the first attempt was told, so its pieces are the same. Those that
    have come are skipped.
    """

    def __init__(
        self, answer: AnswerSoFar, request: generation_pb2.GenerateRequest, patience_s: float
    ) -> None:
        self._answer, self._request, self._patience_s = answer, request, patience_s
        self._read = 0  # pieces that were yielded
        self._come = 0  # pieces of the attempt under way
        self._failures = 0  # failed attempts since the newest piece
        self._give_up = 0.0  # time of the caller's clock, once an attempt has failed

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete; asked after all kept pieces are yielded."""
        return self._answer.finish_reason is not None

    def kept(self) -> Iterator[AnswerPiece]:
        """Yields the pieces that have come and that this reading has not yielded."""
        while self._read < len(self._answer.pieces):
            self._read += 1
            yield self._answer.pieces[self._read - 1]

    def begin(self) -> generation_pb2.GenerateRequest:
        """Begins an attempt, and returns its request."""
        self._come = 0
        if self._answer.seed is not None:
            self._request.sampling.seed = self._answer.seed
        return self._request

    def take(self, chunk: generation_pb2.GenerateChunk) -> None:
        """Adds what is new in a chunk of the attempt to the answer."""
        if chunk.HasField("seed"):
            self._answer.seed = chunk.seed
        for piece in _pieces(chunk):
            self._come += 1
            if self._come > len(self._answer.pieces):
                self._answer.pieces.append(piece)
                self._failures = 0
        if chunk.HasField("finish_reason"):
            self._answer.finish_reason, self._answer.usage = chunk.finish_reason, chunk.usage

    def pause_s(self, error: grpc.RpcError, now: float) -> float:
        """Returns the seconds before the next attempt.

        now: seconds of a monotonic clock.

        Raises:
            OutriderError: no attempt helps, or none has helped for as long as the client is patient.
        """
        failure = error_of(error)
        if not self._failures:
            self._give_up = now + self._patience_s
        pause_s = PAUSE.after(self._failures)
        if isinstance(failure, ServiceOverloadedError):
            pause_s = max(pause_s, failure.retry_after_s or 0.0)
        elif not isinstance(failure, ServiceUnavailableError):
            raise failure from error
        if now + pause_s > self._give_up:
            raise failure from error
        logger.debug("attempt ended after %d tokens, again in %.1f s: %s", self._come, pause_s, failure)
        self._failures += 1
        self._answer.repeats += 1
        return pause_s


def _pieces(chunk: generation_pb2.GenerateChunk) -> Iterator[AnswerPiece]:
    start = 0
    for token_id, origin, length in zip(chunk.token_ids, chunk.origins, chunk.text_lengths, strict=True):
        name = generation_pb2.Origin.Name(origin).removeprefix("ORIGIN_").lower()
        yield AnswerPiece(chunk.text[start : start + length], token_id, name)
        start += length
