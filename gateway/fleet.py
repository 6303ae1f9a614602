"""Which workers exist, and a stream to the least busy of them. Nothing polls: Serve pushes the table."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from gateway.errors import WorkerLostError
from gateway.sequence import Sequence
from gateway.streams import WorkerStream
from protos import rounds_pb2, rounds_pb2_grpc

Role = Literal["target", "draft"]
TargetStream = WorkerStream[rounds_pb2.TargetRequest, rounds_pb2.TargetReply]
DraftStream = WorkerStream[rounds_pb2.DraftRequest, rounds_pb2.DraftReply]

# A silent peer counts as lost after the sum of the first two.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
)


@dataclass(frozen=True)
class Worker:
    """What a worker publishes about itself when it is ready."""

    role: Role
    model: str  # folder or hub id
    address: str  # host:port of its gRPC server
    pid: int
    node: str
    vocab_size: int
    max_length: int  # tokens of context


class Fleet:
    """``workers`` gives those that exist at the moment of asking."""

    def __init__(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self._workers = workers
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: Counter[str] = Counter()  # open ones of this gateway, by address

    def workers(self, role: Role | None = None) -> list[Worker]:
        return [worker for worker in self._workers() if role in (None, worker.role)]

    @asynccontextmanager
    async def open_target(self, sequence: Sequence) -> AsyncIterator[TargetStream]:
        """Raises WorkerLostError if there is no target."""
        with self._least_busy("target") as channel:
            call = rounds_pb2_grpc.TargetWorkerStub(channel).Stream()  # type: ignore[no-untyped-call]
            async with aclosing(TargetStream(call, rounds_pb2.TargetRequest, sequence)) as stream:
                yield stream

    @asynccontextmanager
    async def open_draft(self, sequence: Sequence) -> AsyncIterator[DraftStream]:
        """Raises WorkerLostError if there is no draft worker."""
        with self._least_busy("draft") as channel:
            call = rounds_pb2_grpc.DraftWorkerStub(channel).Stream()  # type: ignore[no-untyped-call]
            async with aclosing(DraftStream(call, rounds_pb2.DraftRequest, sequence)) as stream:
                yield stream

    @contextmanager
    def _least_busy(self, role: Role) -> Iterator[grpc.aio.Channel]:
        addresses = [worker.address for worker in self.workers(role)]
        if not addresses:
            raise WorkerLostError(f"no {role} worker is ready")
        address = min(addresses, key=lambda address: self._streams[address])
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._streams[address] += 1
        try:
            yield self._channels[address]
        finally:
            self._streams[address] -= 1

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(grace=None)
