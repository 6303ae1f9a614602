"""State of a streamed answer, and rules for resuming it when its stream breaks.

Nothing here sends or waits: the blocking client and the asyncio client do that by these common rules.
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
    """Token, and the text that became final with it."""

    text: str
    token_id: int
    # "accepted": drafted and accepted; "target": the target's own token after a Draft; "plain"; "forced"
    origin: str


class AnswerSoFar:
    """Received pieces of an answer; after the last piece also its finish reason and usage."""

    def __init__(
        self,
        open_call: Callable[[generation_pb2.GenerateRequest], Any],
        request: generation_pb2.GenerateRequest,
        patience_s: float,
    ) -> None:
        """open_call: function that sends a request and returns the gRPC call."""
        self._open_call = open_call
        self._request = request
        self._patience_s = patience_s
        self.pieces: list[AnswerPiece] = []
        self.seed: int | None = None  # seed that reproduces this answer
        self.finish_reason: str | None = None  # "stop" or "length"
        self.usage: generation_pb2.Usage | None = None
        self.repeats = 0  # times that the request was sent again

    @property
    def text(self) -> str:
        """Text of the received pieces."""
        return "".join(piece.text for piece in self.pieces)

    def reading(self) -> "AnswerReading":
        """Returns a new reading, which starts at the first piece."""
        return AnswerReading(self, self._request, self._patience_s)


class AnswerReading:
    """Iteration over an answer, with as many attempts as needed.

    Each attempt requests the seed that the first attempt was told, so it receives equal pieces. Pieces that
    were received before are skipped.
    """

    def __init__(
        self, answer: AnswerSoFar, request: generation_pb2.GenerateRequest, patience_s: float
    ) -> None:
        self._answer, self._request, self._patience_s = answer, request, patience_s
        self._read = 0  # pieces that were yielded
        self._come = 0  # received pieces of the current attempt
        self._failures = 0  # failed attempts since the newest piece
        self._give_up = 0.0  # time on the caller's clock; set when an attempt has failed

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete. Valid after all kept pieces were yielded."""
        return self._answer.finish_reason is not None

    def kept(self) -> Iterator[AnswerPiece]:
        """Yields the received pieces that this reading has not yielded yet."""
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
        """Adds the new pieces of a chunk of the current attempt to the answer."""
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
            OutriderError: a further attempt cannot help, or the client's patience is exhausted.
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
