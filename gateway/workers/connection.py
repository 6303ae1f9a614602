"""gRPC stream from this gateway to a worker, which carries all sequences between them."""

import asyncio
import logging
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from outrider.learning.outbox import Outbox
from protos import rounds_pb2

logger = logging.getLogger(f"ray.serve.{__name__}")

SEND_TIMEOUT_S = 2.0  # seconds; a worker that accepts no message for longer counts as lost
_BROKEN = (grpc.RpcError, asyncio.InvalidStateError, TimeoutError)
_LEFT = rounds_pb2.SequenceEnded(
    cause=rounds_pb2.SequenceEnded.LEAVING, details="the worker ended the stream"
)

Name = tuple[int, int]  # number of a sequence, epoch of its stream


class StreamListener(Protocol):
    """The gateway's end of one sequence's stream."""

    def opened(self) -> None:
        """Called when the worker has read the sequence's Open message."""

    def put(self, reply: Any) -> None:
        """Called with each reply to the sequence."""

    def ended(self, end: rounds_pb2.SequenceEnded) -> None:
        """Called when the worker ended the sequence; no reply comes after that."""

    def broken(self, reason: str) -> None:
        """Called when the connection broke; no reply comes after that."""


class WorkerConnection:
    """Stream to a worker, opened at once. It is not opened again after it breaks: ``is_over``.

    ``has_sent``: the worker exists, and may have read requests that it did not answer.
    ``is_leaving``: the worker is being drained. Draft workers do not report it.

    Requests travel in one message if they are sent in one turn of the event loop, or while another message is
    being written.
    """

    def __init__(self, call: Any, requests: type[Message]) -> None:
        """
        Args:
            call: gRPC call of the stream.
            requests: type of the message that holds several requests.
        """
        self._call = call
        self._requests = requests
        self._outbox = Outbox[Message]()
        self._listeners: dict[Name, StreamListener] = {}
        self.is_over = False
        self.has_sent = False
        self.is_leaving = False
        self._running = asyncio.create_task(self._run())

    def listen(self, name: Name, listener: StreamListener) -> None:
        """Passes replies to the sequence to a listener from now on."""
        self._listeners[name] = listener

    def forget(self, name: Name) -> None:
        """Drops replies to the sequence from now on. Idempotent."""
        self._listeners.pop(name, None)

    def send(self, request: Message) -> None:
        """Adds a request to the outbox; drops it if the connection is over."""
        if not self.is_over:
            self._outbox.append(request)

    async def aclose(self) -> None:
        """Ends the connection and all its streams."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        both = writing, reading
        reason = "this gateway ends"
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            reason = next(filter(None, (task.result() for task in done)), "")
        finally:
            self.is_over = True
            self._call.cancel()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            logger.debug("the connection of %d sequences is over: %s", len(self._listeners), reason)
            for listener in [*self._listeners.values()]:
                if reason:
                    listener.broken(reason)
                else:
                    listener.ended(_LEFT)

    async def _write(self) -> str:
        """Writes requests until the stream breaks; returns the reason."""
        try:
            while True:
                outgoing = await self._outbox.woken()
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._call.write(self._requests(requests=outgoing))
                self.has_sent = True
        except TimeoutError:
            return f"no message was taken in {SEND_TIMEOUT_S:g} s"
        except _BROKEN as error:
            return await self._why(error)

    async def _read(self) -> str:
        """Reads replies until the stream ends; returns the reason, empty if the worker ended the stream."""
        try:
            while isinstance(replies := await self._call.read(), Message):
                self._on_message(replies)
            if replies is None:  # no status follows while later messages are unread
                return "the worker sent a message that cannot be read"
        except _BROKEN as error:
            return await self._why(error)
        return await self._why(None)

    def _on_message(self, replies: Any) -> None:
        self.is_leaving = self.is_leaving or bool(getattr(replies, "leaving", ()))
        for opened in replies.opened:
            if (listener := self._listeners.get((opened.sequence, opened.epoch))) is not None:
                listener.opened()
        for reply in replies.replies:
            if (listener := self._listeners.get((reply.sequence, reply.epoch))) is not None:
                listener.put(reply)
        for end in replies.ended:
            if (listener := self._listeners.pop((end.sequence, end.epoch), None)) is not None:
                listener.ended(end)

    async def _why(self, error: BaseException | None) -> str:
        if error is not None and not self._call.done():
            return str(error) or type(error).__name__
        code = await self._call.code()
        return "" if code is grpc.StatusCode.OK else f"{code.name}: {await self._call.details()}"
