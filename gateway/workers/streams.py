"""Stream of a sequence to a worker: sends turns, receives replies."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, Generic, Literal, TypeVar

import grpc

from gateway.adapter import NO_ADAPTER, Adapter
from gateway.errors import (
    GatewayError,
    GenerationFailedError,
    InvalidRequestError,
    ParkedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.sequence import GatewaySequence
from gateway.workers.connection import WorkerConnection
from outrider.decoding.settings import Sampling
from outrider.pace.step import Step
from protos import generation_pb2, rounds_pb2, rounds_pb2_grpc
from protos.conversions import sampling_to_message
from protos.trust import Trust

RequestT = TypeVar("RequestT", rounds_pb2.DraftWorkerRequest, rounds_pb2.TargetWorkerRequest)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)
Role = Literal["target", "draft"]

LOAD_AGE_S = 2.0  # seconds; an older reported load is ignored
ADAPTER_S = 60.0  # seconds; timeout for loading or dropping an adapter at a target
FINGERPRINT_BYTES = 4  # enough to tell apart the targets of one service over time
VERSION = version("outrider")
SUSPECT_S = 5.0  # seconds after its loss for which a worker is the last choice
_REFUSED = {
    rounds_pb2.SequenceEnded.INVALID: "prompt",
    rounds_pb2.SequenceEnded.TOO_LARGE: "max_tokens",
    rounds_pb2.SequenceEnded.GRAMMAR: "structured_outputs",
    rounds_pb2.SequenceEnded.ADAPTER: "model",
}
_SERVICES: dict[Role, tuple[Any, Any]] = {
    "target": (rounds_pb2_grpc.TargetWorkerStub, rounds_pb2.TargetWorkerRequests),
    "draft": (rounds_pb2_grpc.DraftWorkerStub, rounds_pb2.DraftWorkerRequests),
}

# A silent peer counts as lost after the sum of the first two values. The ping's own timeout decides: gRPC's
# default is a minute, and keepalive_timeout_ms does not shorten it.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
)


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker publishes about itself when it is ready."""

    role: Role
    model: str  # folder or hub id
    address: str  # host:port of its gRPC server
    pid: int  # process that speaks gRPC
    node: str
    vocab_size: int
    max_length: int  # tokens of context
    ranks: tuple[int, ...] = ()  # process ids of its engine, rank 0 first
    gpus: tuple[str, ...] = ()  # ids of the GPUs that Ray has reserved for that process
    places: tuple[dict[str, Any], ...] = ()  # device, memory and threads of each rank
    slow_because: tuple[str, ...] = ()  # reasons why steps on its GPU are slower than they could be
    promise: str = ""  # how far the same seed gives the same text, if it holds the target
    is_exact: bool = False  # whether the same seed gives the same text, whatever the batch
    settings: dict[str, Any] = field(default_factory=dict)  # settings of its engine
    weights: str = ""  # digest of its model's weights, if receipts are made; see outrider/receipts/digests.py
    tokenizer: str = ""  # digest of its model's tokenizer, if receipts are made
    draft: str = ""  # name of its draft; empty: it holds the target
    # Steps timed before it served; key: its target drafter, or empty for its own model.
    survey: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Short hash of version, model and numerics. If it changes, the same seed may give another text."""
        told = "\n".join((self.model, self.promise, str(self.settings.get("quantization")))).encode()
        return f"outrider-{VERSION}-{blake2b(told, digest_size=FINGERPRINT_BYTES).hexdigest()}"


def shares_gpu(one: WorkerInfo, other: WorkerInfo) -> bool:
    """Returns whether both workers have the same GPU."""
    return one.node == other.node and not set(one.gpus).isdisjoint(other.gpus)


class Link:
    """Connection of this gateway to one worker, with the load that the worker reported last."""

    def __init__(self, worker: WorkerInfo, trust: Trust) -> None:
        self.worker = worker
        self._trust = trust
        self._channel: grpc.aio.Channel = trust.connect(worker.address, CHANNEL_OPTIONS)
        self._connection: WorkerConnection | None = None
        self.streams = 0  # open streams of this gateway
        self.load: rounds_pb2.Load | None = None  # from the newest reply
        self.step_ns = 0  # duration of the newest step that was reported
        self.replied_at = 0.0  # time of the newest reply, in the event loop's time
        self.suspect_until = 0.0  # in the event loop's time

    @property
    def place(self) -> str:
        """Name of the worker in messages."""
        return f"{self.worker.role} worker {self.worker.address}"

    def num_sequences(self, now: float) -> int:
        """Returns the number of sequences at the worker, as this gateway knows it.

        A recent report also counts the sequences of other gateways.
        """
        if self.load is None or now - self.replied_at > LOAD_AGE_S:
            return self.streams
        return max(self.streams, self.load.running + self.load.waiting)

    def connection(self) -> WorkerConnection:
        """Returns the connection, opened again if it has ended."""
        if self._connection is None or self._connection.is_over:
            stub, requests = _SERVICES[self.worker.role]
            call = stub(self._channel).Stream(metadata=self._trust.metadata)
            self._connection = WorkerConnection(call, requests)
        return self._connection

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Loads an adapter at this target; returns it with the digest of its files.

        Raises:
            InvalidRequestError: the target refuses it.
            WorkerLostError: the target does not answer.
        """
        try:
            loaded = await self._target().LoadAdapter(
                adapter.to_message(), metadata=self._trust.metadata, timeout=ADAPTER_S
            )
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequestError("lora_path", details) from error
            raise WorkerLostError(f"{self.place}: {details}") from error
        return replace(adapter, digest=loaded.digest)

    async def drop_adapter(self, adapter: Adapter) -> None:
        """Drops an adapter at this target once no open sequence has it. Raises grpc.aio.AioRpcError."""
        await self._target().DropAdapter(
            adapter.to_message(), metadata=self._trust.metadata, timeout=ADAPTER_S
        )

    def _target(self) -> Any:
        stub, _ = _SERVICES["target"]
        return stub(self._channel)

    def mark_suspect(self) -> None:
        """Makes the worker the last choice for SUSPECT_S seconds."""
        self.suspect_until = asyncio.get_running_loop().time() + SUSPECT_S

    @property
    def is_leaving(self) -> bool:
        """Whether the worker is being drained."""
        return self._connection is not None and self._connection.is_leaving

    @property
    def no_drafts_because(self) -> dict[str, str]:
        """Reasons why drafters of this target are out of use, by drafter, as last reported."""
        return {} if self.load is None else dict(self.load.no_drafts_because)

    async def aclose(self) -> None:
        """Ends all streams."""
        if self._connection is not None:
            await self._connection.aclose()
        await self._channel.close(grace=None)


class WorkerStream(Generic[RequestT, ReplyT]):
    """Stream of one sequence to one worker. ``send`` and ``receive`` raise WorkerLostError once it breaks."""

    def __init__(
        self,
        link: Link,
        request: type[RequestT],
        sequence: GatewaySequence,
        sampling: Sampling,
        *,
        is_isolated: bool,
        adapter: Adapter = NO_ADAPTER,
    ) -> None:
        """
        Args:
            sampling: settings of the sequence for this worker.
            adapter: adapter of the sequence at this worker.
            is_isolated: the sequence may be the cause of an earlier loss. Its requests wait until the worker
                has read the Open message: a loss before that has another cause.
        """
        self._sampling, self._adapter = sampling, adapter
        self._link = link
        self._request: type[RequestT] = request
        self._sequence = sequence
        self._opened = False
        self._waiting: list[RequestT] | None = [] if is_isolated else None  # None: requests do not wait
        self._known = 0  # tokens of the sequence that the worker has been sent
        self._replies: deque[ReplyT] = deque()
        self._has_reply = asyncio.Event()
        self._end: Callable[[], GatewayError] | None = None
        self.is_closed = False
        link.streams += 1
        sequence.epoch += 1
        self._epoch = sequence.epoch
        self._connection = link.connection()
        self._connection.listen((sequence.number, self._epoch), self)

    @property
    def worker(self) -> WorkerInfo:
        return self._link.worker

    @property
    def address(self) -> str:
        return self._link.worker.address

    @property
    def link(self) -> Link:
        return self._link

    def turn(self, round_number: int, traceparent: str = "") -> rounds_pb2.Turn:
        """Returns a new turn: the length that the worker knows, and the tokens since then.

        Args:
            round_number: number that its replies carry: a higher number, or that of the turn to be replaced.
            traceparent: span that waits for the reply; empty if no span is recorded.
        """
        base, self._known = self._known, len(self._sequence)
        return rounds_pb2.Turn(
            round=round_number,
            base=base,
            tokens=self._sequence.since(base),
            traceparent=traceparent,
        )

    def send(self, request: RequestT) -> None:
        """Sends a request. The first request opens the sequence at the worker.

        Raises:
            WorkerLostError: the stream is broken.
            InvalidRequestError: the worker cannot serve such a sequence.
            GenerationFailedError: the worker's engine cannot continue the sequence.
        """
        if self._end is not None:
            raise self._end()
        if not self._opened:
            self._opened = True
            self._send(self._request(open=self._opening()))
        if self._waiting is None:
            self._send(request)
        else:
            self._waiting.append(request)

    def _send(self, request: RequestT) -> None:
        request.sequence, request.epoch = self._sequence.number, self._epoch
        self._connection.send(request)

    def _opening(self) -> rounds_pb2.Open:
        return rounds_pb2.Open(
            prompt_length=len(self._sequence.prompt),
            noise_key=self._sequence.noise_key,
            sampling=sampling_to_message(self._sampling),
            adapter=self._adapter.to_message(),
            queued_ms=round(self._sequence.queued_s * 1000),
            predicted=self._sequence.prediction,
            past=[generation_pb2.TokenIds(ids=answer) for answer in self._sequence.past],
        )

    async def receive(
        self, round_number: int, timeout: float | None = None, plain_round: int | None = None
    ) -> ReplyT | None:
        """Returns the next reply to that round; None if it does not come within ``timeout`` seconds.

        Replies to older rounds are dropped. Raises what ``send`` raises.

        plain_round: an older round whose replies are wanted too.
        """
        rounds = plain_round, round_number
        if (reply := self._next(rounds)) is not None:  # avoids a timer, which costs as much as all else here
            return reply
        try:
            async with asyncio.timeout(timeout):
                while (reply := self._next(rounds)) is None:
                    self._has_reply.clear()
                    await self._has_reply.wait()
        except TimeoutError:
            return None
        return reply

    async def answered(self, round_number: int) -> bool:
        """Waits for a reply to that round, which stays the next reply; returns False if the stream ends."""
        while self.arrived(round_number) is None:
            if self._end is not None:
                return False
            self._has_reply.clear()
            await self._has_reply.wait()
        return True

    def arrived(self, round_number: int) -> ReplyT | None:
        """Returns the next reply to that round if it has come; it stays the next reply until ``take``."""
        while self._replies and self._replies[0].round != round_number:
            self._replies.popleft()
        return self._replies[0] if self._replies else None

    def take(self) -> None:
        """Removes the reply that ``arrived`` has returned."""
        self._replies.popleft()

    def _next(self, rounds: tuple[int | None, int]) -> ReplyT | None:
        """Returns the next reply to these rounds; None: it has not come."""
        while self._replies:
            if (reply := self._replies.popleft()).round in rounds:
                return reply
        if self._end is not None:
            raise self._end()
        return None

    def lost(self, reason: str) -> GatewayError:
        """Returns the error to raise for an invalid reply, and makes the worker suspect for a while."""
        self.broken(reason)
        assert self._end is not None
        return self._end()

    def park(self) -> None:
        """Closes the stream; its reader gets a ParkedError."""
        self._finish(lambda: ParkedError(f"{self._link.place}: the request is parked"))
        self.close()

    def close(self) -> None:
        """Closes the stream, so the worker frees the sequence. Idempotent."""
        if self.is_closed:
            return
        self._link.streams -= 1
        self.is_closed = True
        self._connection.forget((self._sequence.number, self._epoch))
        self._finish(lambda: WorkerLostError("the stream is closed"))
        if self._opened:
            self._send(self._request(close=rounds_pb2.Close()))

    # Callbacks of the connection.

    def opened(self) -> None:
        """Sends the requests that have waited until the worker read the Open message."""
        waiting, self._waiting = self._waiting, None
        for request in waiting or ():
            self._send(request)

    def put(self, reply: ReplyT) -> None:
        """Stores the worker's next reply, and the load that it reports."""
        link = self._link
        link.load, link.replied_at = reply.load, asyncio.get_running_loop().time()
        link.step_ns = reply.timings.last_step.ns or link.step_ns
        self._replies.append(reply)
        self._has_reply.set()

    def ended(self, end: rounds_pb2.SequenceEnded) -> None:
        """Ends the stream because the worker ended the sequence."""
        place = self._link.place
        if end.cause in _REFUSED:
            self._finish(lambda: InvalidRequestError(_REFUSED[end.cause], end.details))
        elif end.cause == rounds_pb2.SequenceEnded.FAILED:
            self._finish(lambda: GenerationFailedError(f"{place}: {end.details}"))
        else:  # the worker is being drained
            self._link.mark_suspect()
            self._finish(lambda: WorkerLostError(f"{place}: {end.details}"))

    def broken(self, reason: str) -> None:
        """Ends the stream because the connection broke."""
        self._link.mark_suspect()
        may_be_reason = self._opened and self._waiting is None and self._connection.has_sent
        kind = SequenceLostError if may_be_reason else WorkerLostError
        self._finish(lambda: kind(f"{self._link.place}: {reason}"))

    def _finish(self, error: Callable[[], GatewayError]) -> None:
        self._end = self._end or error
        self._has_reply.set()
