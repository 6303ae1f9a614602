"""A client of the gRPC API that finishes its answers even if gateways are lost."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.learning.backoff import Backoff
from protos import generation_pb2, generation_pb2_grpc

PAUSE = Backoff(0.2, 3.0)  # seconds between attempts
RETRIED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
# Serve's proxy answers INTERNAL for a lost gateway as for a defect: only Ray's words differ.
LOST_GATEWAY = ("actor died", "actor is temporarily unavailable", "Actor is unavailable")
RETRY_DELAY = "retry-after-ms"  # trailing metadata of a gateway whose queue is full


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerPiece:
    """Token, and the text that is certain with it."""

    text: str
    token_id: int
    # "accepted": drafted and confirmed; "target": the target's own after a Draft; "plain"; "forced"
    origin: str


class Answer:
    """Pieces of an answer, to be iterated once; after them its seed, usage and finish reason."""

    def __init__(self, client: "Client", request: generation_pb2.GenerateRequest) -> None:
        self._client = client
        self._request = request
        self.seed: int | None = None  # seed that gives this answer again
        self.finish_reason: str | None = None  # "stop" or "length"
        self.usage: generation_pb2.Usage | None = None
        self.repeats = 0  # times that the request was sent again

    def __iter__(self) -> Iterator[AnswerPiece]:
        """Yields the pieces. Raises grpc.RpcError if repeats cannot help, or have not helped in time."""
        yielded = 0  # tokens
        deadline = time.monotonic() + self._client.patience_s
        failures = 0  # failed attempts since the newest token
        while self.finish_reason is None:
            try:
                skipped = 0
                for piece in self._pieces():
                    if skipped < yielded:  # an earlier attempt has yielded the piece; one seed, one text
                        skipped += 1
                        continue
                    yielded, skipped = yielded + 1, skipped + 1
                    deadline, failures = time.monotonic() + self._client.patience_s, 0
                    yield piece
            except grpc.RpcError as error:
                pause_s = max(PAUSE.after(failures), _asked_delay_s(error))
                if not _is_temporary(error) or time.monotonic() + pause_s > deadline:
                    raise
                logger.debug(
                    "attempt ended with %s after %d tokens, again in %.1f s", error.code(), yielded, pause_s
                )
                time.sleep(pause_s)
                failures += 1
                self.repeats += 1

    def _pieces(self) -> Iterator[AnswerPiece]:
        """Yields the pieces of one attempt."""
        if self.seed is not None:
            self._request.sampling.seed = self.seed
        call = self._client.stub.Generate(self._request, metadata=self._client.metadata)
        try:
            for chunk in call:
                if chunk.HasField("seed"):
                    self.seed = chunk.seed
                start = 0
                for token_id, origin, length in zip(
                    chunk.token_ids, chunk.origins, chunk.text_lengths, strict=True
                ):
                    name = generation_pb2.Origin.Name(origin).removeprefix("ORIGIN_").lower()
                    yield AnswerPiece(chunk.text[start : start + length], token_id, name)
                    start += length
                if chunk.HasField("finish_reason"):
                    self.finish_reason, self.usage = chunk.finish_reason, chunk.usage
        finally:
            call.cancel()


class Client:
    """Client of a gateway, or of a proxy in front of several."""

    def __init__(self, address: str, api_key: str | None = None, patience_s: float = 60.0) -> None:
        """Opens a channel.

        Args:
            address: host:port.
            patience_s: seconds without a new token after which a broken answer is given up.
        """
        self._channel = grpc.insecure_channel(address)
        self.stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.patience_s = patience_s

    def generate(
        self,
        prompt: str,
        stop: tuple[str, ...] = (),
        speculation: Mapping[str, Any] | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
        prediction: str | None = None,
        **sampling: Any,
    ) -> Answer:
        """Asks for one answer; arguments are the fields of the messages in generation.proto.

        prediction: what the answer probably says.
        """
        form = None if structured_outputs is None else generation_pb2.StructuredOutputs(**structured_outputs)
        return Answer(
            self,
            generation_pb2.GenerateRequest(
                text=prompt,
                stop=stop,
                speculation=generation_pb2.SpeculationSettings(**{"report": True, **(speculation or {})}),
                sampling=generation_pb2.Sampling(**sampling),
                structured_outputs=form,
                predicted_text=prediction,
            ),
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _is_temporary(error: grpc.RpcError) -> bool:
    details = error.details() or ""
    lost = error.code() is grpc.StatusCode.INTERNAL and any(words in details for words in LOST_GATEWAY)
    return lost or error.code() in RETRIED


def _asked_delay_s(error: grpc.RpcError) -> float:
    """Returns the delay that a gateway with a full queue asks for."""
    metadata: Any = error.trailing_metadata() or ()
    return float(dict(metadata).get(RETRY_DELAY, 0)) / 1e3
