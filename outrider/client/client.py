"""A client of the gRPC API that finishes its answers though gateways come and go."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from protos import generation_pb2, generation_pb2_grpc

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.0  # between attempts, doubled from one to the next
AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
# Serve's proxy says INTERNAL where the gateway behind it is lost, as it does for a defect: Ray's words tell.
LOST_GATEWAY = ("actor died", "actor is temporarily unavailable")
RETRY_DELAY = "retry-after-ms"  # trailing metadata of a gateway whose queue is full


@dataclass(frozen=True)
class Piece:
    """A token, and the text that is certain with it."""

    text: str
    token_id: int
    origin: (
        str  # "accepted": drafted and confirmed; "target": the target's own after a Draft; "plain"; "forced"
    )


class Answer:
    """The pieces of one answer, to be iterated once; what is known of the whole afterwards."""

    def __init__(self, client: "Client", request: generation_pb2.GenerateRequest) -> None:
        self._client = client
        self._request = request
        self.seed: int | None = None  # gives this answer again
        self.finish_reason: str | None = None  # "stop" or "length"
        self.usage: generation_pb2.Usage | None = None
        self.repeats = 0  # times that the request was sent again

    def __iter__(self) -> Iterator[Piece]:
        """Raises grpc.RpcError for what sending it again cannot mend, or has not in time."""
        said = 0  # tokens
        deadline = time.monotonic() + self._client.patience_s
        pause_s = SHORTEST_PAUSE_S
        while self.finish_reason is None:
            try:
                skipped = 0
                for piece in self._pieces():
                    if skipped < said:  # an earlier attempt has brought it already, by the seed the same
                        skipped += 1
                        continue
                    said, skipped = said + 1, skipped + 1
                    deadline, pause_s = time.monotonic() + self._client.patience_s, SHORTEST_PAUSE_S
                    yield piece
            except grpc.RpcError as error:
                pause_s = max(pause_s, _asked_delay_s(error))
                if not _may_pass(error) or time.monotonic() + pause_s > deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self.repeats += 1

    def _pieces(self) -> Iterator[Piece]:
        """Of one attempt."""
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
                    yield Piece(chunk.text[start : start + length], token_id, name)
                    start += length
                if chunk.HasField("finish_reason"):
                    self.finish_reason, self.usage = chunk.finish_reason, chunk.usage
        finally:
            call.cancel()


class Client:
    """To a gateway, or to whatever stands before several."""

    def __init__(self, address: str, api_key: str | None = None, patience_s: float = 60.0) -> None:
        """
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
        **sampling: Any,
    ) -> Answer:
        """One answer; what is asked of it as the messages in generation.proto have it."""
        form = None if structured_outputs is None else generation_pb2.StructuredOutputs(**structured_outputs)
        return Answer(
            self,
            generation_pb2.GenerateRequest(
                text=prompt,
                stop=stop,
                speculation=generation_pb2.SpeculationSettings(**(speculation or {})),
                sampling=generation_pb2.Sampling(**sampling),
                structured_outputs=form,
            ),
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _may_pass(error: grpc.RpcError) -> bool:
    details = error.details() or ""
    lost = error.code() is grpc.StatusCode.INTERNAL and any(words in details for words in LOST_GATEWAY)
    return lost or error.code() in AGAIN


def _asked_delay_s(error: grpc.RpcError) -> float:
    """What a gateway with a full queue asks for."""
    metadata: Any = error.trailing_metadata() or ()
    return float(dict(metadata).get(RETRY_DELAY, 0)) / 1e3
