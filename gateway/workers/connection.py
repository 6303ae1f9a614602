"""This gateway's one gRPC stream to a worker, which carries all sequences that it has there."""

import asyncio
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from protos import rounds_pb2

SEND_TIMEOUT_S = 2.0  # in which the worker has to take a message off our hands
_BROKEN = (grpc.RpcError, asyncio.InvalidStateError, TimeoutError)

Name = tuple[int, int]  # of a sequence, and its epoch


class StreamListener(Protocol):
    """One sequence at the gateway's end."""

    def taken(self) -> None:
        """The worker has read its opening."""

    def put(self, reply: Any) -> None:
        """The worker's next reply to it."""

    def ended(self, end: rounds_pb2.Ended) -> None:
        """The worker ended it; nothing more comes."""

    def broken(self, reason: str) -> None:
        """The connection did; nothing more comes."""


class WorkerConnection:
    """Opened at once, and over for good when it breaks: ``is_over``.

    What is told while the event loop turns once, or an earlier message is on its way, travels together.
    """

    def __init__(self, call: Any, requests: type[Message]) -> None:
        """
        Args:
            call: the stream.
            requests: the message of several requests.
        """
        self._call = call
        self._requests = requests
        self._untold: list[Message] = []
        self._is_woken = asyncio.Event()
        self._listeners: dict[Name, StreamListener] = {}
        self.is_over = False
        self._running = asyncio.create_task(self._run())

    def listen(self, name: Name, listener: StreamListener) -> None:
        """From now on what is said of the sequence goes there."""
        self._listeners[name] = listener

    def forget(self, name: Name) -> None:
        """Nobody listens to it any more. Forgetting twice does nothing more."""
        self._listeners.pop(name, None)

    def tell(self, request: Message) -> None:
        """To a connection that is over nothing is told."""
        if not self.is_over:
            self._untold.append(request)
            self._is_woken.set()

    async def aclose(self) -> None:
        """Ends it, and with it whatever is open."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        both = writing, reading
        reason = "this gateway ends"
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            reason = next(filter(None, (task.result() for task in done)), "the worker ended the stream")
        finally:
            self.is_over = True
            self._call.cancel()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for listener in [*self._listeners.values()]:
                listener.broken(reason)

    async def _write(self) -> str:
        """Returns why it cannot go on."""
        try:
            while True:
                await self._is_woken.wait()
                self._is_woken.clear()
                untold, self._untold = self._untold, []
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._call.write(self._requests(requests=untold))
        except TimeoutError:
            return f"no message was taken in {SEND_TIMEOUT_S:g} s"
        except _BROKEN as error:
            return await self._why(error)

    async def _read(self) -> str:
        """Returns why it cannot go on; empty where the worker ended the stream."""
        try:
            while isinstance(replies := await self._call.read(), Message):
                self._hear(replies)
            if replies is None:  # The status never comes while messages behind this one are unread.
                return "the worker sent a message that cannot be read"
        except _BROKEN as error:
            return await self._why(error)
        return await self._why(None)

    def _hear(self, replies: Any) -> None:
        for taken in replies.taken:
            if (listener := self._listeners.get((taken.sequence, taken.epoch))) is not None:
                listener.taken()
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
