"""One sequence's stream to one worker: turns out, replies in."""

import asyncio
import contextlib
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from gateway.errors import WorkerLostError
from gateway.sequence import Sequence
from protos import rounds_pb2
from protos.convert import sampling_to_message

RequestT = TypeVar("RequestT", rounds_pb2.DraftRequest, rounds_pb2.TargetRequest)
ReplyT = TypeVar("ReplyT", rounds_pb2.DraftReply, rounds_pb2.TargetReply)

SEND_TIMEOUT_S = 2.0  # for a worker to take a message off our hands
CLOSE_GRACE_S = 0.2  # for the worker to confirm a normal end before the call is cancelled
_BROKEN = (grpc.RpcError, asyncio.InvalidStateError)  # what a finished call raises


class WorkerStream(Generic[RequestT, ReplyT]):
    """``send`` and ``receive`` raise WorkerLostError once the stream is broken."""

    def __init__(self, call: Any, request: type[RequestT], sequence: Sequence) -> None:
        self._call = call
        self._request: type[RequestT] = request
        self._sequence = sequence
        self._opened = False
        self._known = 0  # tokens of the sequence that the worker was told
        self._read: asyncio.Task[ReplyT] | None = None
        sequence.epoch += 1
        self._epoch = sequence.epoch

    def turn(self) -> rounds_pb2.Turn:
        """The newest turn: what the worker was told before, and the tokens since then."""
        base, self._known = self._known, len(self._sequence)
        return rounds_pb2.Turn(
            epoch=self._epoch, round=self._sequence.round, base=base, tokens=self._sequence.since(base)
        )

    async def send(self, request: RequestT) -> None:
        """The first request opens the sequence at the worker."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                if not self._opened:
                    self._opened = True
                    await self._call.write(self._request(open=self._opening()))
                await self._call.write(request)
        except (*_BROKEN, TimeoutError) as error:
            raise WorkerLostError(_reason(error)) from error

    def _opening(self) -> rounds_pb2.Open:
        return rounds_pb2.Open(
            epoch=self._epoch,
            prompt_length=len(self._sequence.prompt),
            noise_key=self._sequence.noise_key,
            sampling=sampling_to_message(self._sequence.sampling),
        )

    async def receive(self, round_number: int, timeout: float | None = None) -> ReplyT | None:
        """The next reply to that round, None if it is not there within ``timeout`` seconds.

        Replies to older rounds are dropped on the way.
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
            reply = _result(read)
            if reply.round == round_number:
                return reply

    async def aclose(self) -> None:
        """Ends the stream, saying so where it is a normal end; the worker frees the sequence either way."""
        if self._sequence.finish_reason is not None:
            with contextlib.suppress(*_BROKEN):
                await self._call.write(self._request(close=rounds_pb2.Close()))
                await self._call.done_writing()
                await asyncio.wait({asyncio.create_task(self._call.code())}, timeout=CLOSE_GRACE_S)
        self._call.cancel()
        if self._read is not None:
            await asyncio.gather(self._read, return_exceptions=True)


def _result(read: asyncio.Task[ReplyT]) -> ReplyT:
    try:
        reply = read.result()
    except (*_BROKEN, asyncio.CancelledError) as error:
        raise WorkerLostError(_reason(error)) from error
    if not isinstance(reply, Message):  # grpc.aio.EOF
        raise WorkerLostError("the worker ended the stream")
    return reply


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
