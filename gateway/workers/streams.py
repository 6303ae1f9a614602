"""One sequence's stream to one worker: turns out, replies in."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import grpc
from google.protobuf.message import Message

from gateway.errors import (
    GatewayError,
    InvalidRequestError,
    SequenceFailedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.sequence import Sequence
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from protos.conversions import sampling_to_message
from protos.stream_status import FAILED, LEAVING, TAKEN

RequestT = TypeVar("RequestT", rounds_pb2.DraftRequest, rounds_pb2.TargetRequest)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)
Role = Literal["target", "draft"]

SEND_TIMEOUT_S = 2.0
CLOSE_GRACE_S = 0.2  # for the worker to confirm a normal end before the call is cancelled
LOAD_AGE_S = 2.0  # for which a reported load is believed
SUSPECT_S = 5.0  # for which a worker that was lost comes last when one is chosen
_BROKEN = (grpc.RpcError, asyncio.InvalidStateError)  # what a finished call raises
_REFUSED = {grpc.StatusCode.INVALID_ARGUMENT: "prompt", grpc.StatusCode.RESOURCE_EXHAUSTED: "max_tokens"}


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
    ranks: tuple[int, ...] = ()  # process ids of a target's others
    settings: dict[str, Any] = field(default_factory=dict)  # of its engine, as it runs


@dataclass
class Link:
    """This gateway's connection to one worker, and what it last heard over it."""

    worker: Worker
    channel: grpc.aio.Channel
    streams: int = 0  # open ones of this gateway
    load: rounds_pb2.Load | None = None  # from the newest reply
    step_ns: int = 0  # of the newest step that it told of
    heard_at: float = 0.0  # when that was, in the event loop's time
    suspect_until: float = 0.0  # the same clock
    closing: set[asyncio.Task[None]] = field(default_factory=set)  # streams that are about to end

    def busy(self, now: float) -> int:
        """Sequences there: those that we know of, or more if other gateways had some just now."""
        if self.load is None or now - self.heard_at > LOAD_AGE_S:
            return self.streams
        return max(self.streams, self.load.running + self.load.waiting)


class WorkerStream(Generic[RequestT, ReplyT]):
    """``send`` and ``receive`` raise WorkerLostError once the stream is broken."""

    def __init__(
        self, link: Link, call: Any, request: type[RequestT], sequence: Sequence, sampling: Sampling
    ) -> None:
        """sampling: the sequence's, as this worker is to take it."""
        self._sampling = sampling
        self._link = link
        self._call = call
        self._request: type[RequestT] = request
        self._sequence = sequence
        self._opened = False
        self.is_closed = False  # by ourselves
        self._known = 0  # tokens of the sequence that the worker was told
        self._read: asyncio.Task[ReplyT] | None = None
        self._writing = asyncio.Lock()  # a call takes one message after the other
        self._writes: set[asyncio.Task[None]] = set()  # under way: they outlive whoever sends
        link.streams += 1
        sequence.epoch += 1
        self._epoch = sequence.epoch

    @property
    def address(self) -> str:
        return self._link.worker.address

    def turn(self, round_number: int, traceparent: str = "") -> rounds_pb2.Turn:
        """The newest turn: what the worker was told before, and the tokens since then.

        Args:
            round_number: by which its replies are known; higher than before, or the same to top the turn up.
            traceparent: of the span that waits for the reply, where that is recorded.
        """
        base, self._known = self._known, len(self._sequence)
        return rounds_pb2.Turn(
            round=round_number,
            base=base,
            tokens=self._sequence.since(base),
            traceparent=traceparent,
        )

    async def send(self, request: RequestT, timeout: float = SEND_TIMEOUT_S) -> None:
        """The first request opens the sequence at the worker.

        Args:
            timeout: seconds in which the worker has to take the message off our hands.

        Raises:
            WorkerLostError: the stream is broken.
            InvalidRequestError: the worker cannot serve such a sequence.
            SequenceFailedError: its engine cannot go on with it.
        """
        # A write that is cancelled, or crosses another, may leave the worker's side open for ever.
        writing = asyncio.create_task(self._write(request))
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        writing.add_done_callback(_error_of)
        await asyncio.wait({writing}, timeout=timeout)
        if not writing.done():
            self._call.cancel()  # nobody is to wait for what follows from half a message
            raise await self.lost(TimeoutError(f"no message was taken in {timeout:g} s"))
        error = _error_of(writing)
        if error is not None:
            raise await self.lost(error) from error

    async def _write(self, request: RequestT) -> None:
        async with self._writing:
            if self.is_closed:
                return  # it had to wait for another until nobody wanted it any more
            if not self._opened:
                self._opened = True
                await self._call.write(self._named(self._request(open=self._opening())))
            await self._call.write(self._named(request))

    def _named(self, request: RequestT) -> RequestT:
        request.sequence, request.epoch = self._sequence.number, self._epoch
        return request

    def _opening(self) -> rounds_pb2.Open:
        return rounds_pb2.Open(
            prompt_length=len(self._sequence.prompt),
            noise_key=self._sequence.noise_key,
            sampling=sampling_to_message(self._sampling),
        )

    async def receive(self, round_number: int, timeout: float | None = None) -> ReplyT | None:
        """The next reply to that round, None if it is not there within ``timeout`` seconds.

        Replies to older rounds are dropped on the way. Raises as ``send`` does.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            self._read = self._read or asyncio.create_task(self._call.read())
            # Cancelling a read would cancel the call: a read outlives the wait for it.
            await asyncio.wait({self._read}, timeout=None if deadline is None else deadline - loop.time())
            if not self._read.done():
                return None
            read, self._read = self._read, None
            reply = await self._result(read)
            self._link.load, self._link.heard_at = reply.load, loop.time()
            self._link.step_ns = reply.timings.last_step.ns or self._link.step_ns
            if reply.round == round_number:
                return reply

    async def _result(self, read: asyncio.Task[ReplyT]) -> ReplyT:
        try:
            reply = read.result()
        except (*_BROKEN, asyncio.CancelledError) as error:
            raise await self.lost(error) from error
        if not isinstance(reply, Message):  # grpc.aio.EOF
            raise await self.lost(None)
        return reply

    async def lost(self, error: BaseException | None) -> GatewayError:
        """What to raise, and a note that this worker is not to be trusted for a while.

        error: why: the call broke, or a reply makes no sense; None: the worker ended the stream.
        """
        code = await self._call.code() if self._call.done() else None
        if code in _REFUSED:
            return InvalidRequestError(_REFUSED[code], await self._call.details())
        worker = self._link.worker
        place = f"{worker.role} worker {worker.address}"
        if code is FAILED:
            return SequenceFailedError(f"{place}: {await self._call.details()}")
        self._link.suspect_until = asyncio.get_running_loop().time() + SUSPECT_S
        self._call.cancel()  # where it is silent, and not over
        was_taken = TAKEN in tuple(await self._call.initial_metadata() or ())
        kind = SequenceLostError if was_taken and code is not LEAVING else WorkerLostError
        return kind(f"{place}: {_reason(error)}")

    async def aclose(self) -> None:
        """Ends the stream, saying so where it is a normal end; the worker frees the sequence either way.

        A reader that has what it wants may be cancelled meanwhile: the worker hears of the end all the same.
        """
        self._link.streams -= 1
        self.is_closed = True
        closing = asyncio.create_task(self._close())
        self._link.closing.add(closing)
        closing.add_done_callback(self._link.closing.discard)
        await asyncio.shield(closing)

    async def _close(self) -> None:
        if self._sequence.finish_reason is not None:
            goodbye = asyncio.create_task(self._say_goodbye())
            self._writes.add(goodbye)
            await asyncio.wait({goodbye}, timeout=CLOSE_GRACE_S)
        self._call.cancel()
        for writing in self._writes:
            writing.cancel()  # one that waits for a connection would not hear of the end of its call
        reading = [] if self._read is None else [self._read]
        await asyncio.gather(*reading, *self._writes, return_exceptions=True)

    async def _say_goodbye(self) -> None:
        async with self._writing:
            await self._call.write(self._named(self._request(close=rounds_pb2.Close())))
            await self._call.done_writing()
        await self._call.code()


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Of a task that is done."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "the worker ended the stream"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
