"""A worker's end of a gateway's stream, taken apart: a conversation for each sequence."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from protos import rounds_pb2

Cause = rounds_pb2.SequenceEnded.Cause


class EndedError(Exception):
    """Raised by a conversation: the worker ends its sequence; without a cause, the whole stream breaks."""

    def __init__(self, cause: Cause | None, details: str) -> None:
        super().__init__(details)
        self.cause = cause


class Requests:
    """Messages of one sequence, Open and Close among them."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()

    def add(self, request: Any) -> None:
        """The next one has arrived."""
        self._inbox.put_nowait(request)

    @property
    def has_more(self) -> bool:
        """Whether one has arrived that was not read."""
        return not self._inbox.empty()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            request = await self._inbox.get()
            yield request
            if request.HasField("close"):
                return


Converse = Callable[[Requests], AsyncIterator[Any]]


async def serve(
    requests: AsyncIterator[Any],
    context: Any,
    replies: type[Any],
    converse: Converse,
    leaving: asyncio.Event | None = None,
) -> None:
    """The handler of a stream.

    Args:
        replies: the message of several replies.
        converse: gets the requests of one sequence; gives its replies.
        leaving: the worker announces that it leaves once this is set; None: it stays.
    """
    asked: dict[tuple[int, int], Requests] = {}
    conversations: list[asyncio.Task[None]] = []
    writing = asyncio.Lock()
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def write(**told: Any) -> None:
        async with writing:
            await context.write(replies(**told))

    async def one(name: tuple[int, int]) -> None:
        sequence, epoch = name
        try:
            async for reply in converse(asked[name]):
                reply.sequence, reply.epoch = name
                await write(replies=[reply])
        except EndedError as end:
            if end.cause is not None:
                ended = rounds_pb2.SequenceEnded(
                    sequence=sequence, epoch=epoch, cause=end.cause, details=str(end)
                )
                await write(ended=[ended])
            elif not broken.done():
                broken.set_result(str(end))

    async def read() -> None:
        async for several in requests:
            for request in several.requests:
                name = request.sequence, request.epoch
                if request.HasField("open"):
                    asked[name] = Requests()
                    conversations.append(asyncio.create_task(one(name)))
                    opened = rounds_pb2.Opened(sequence=request.sequence, epoch=request.epoch)
                    await write(opened=[opened])
                asked[name].add(request)

    async def announce() -> None:
        if leaving is not None:
            await leaving.wait()
            await write(leaving=[rounds_pb2.Leaving()])

    reading = asyncio.create_task(read())
    conversations.append(asyncio.create_task(announce()))
    try:
        either: list[asyncio.Future[Any]] = [reading, broken]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, broken.result())
        reading.result()
    finally:
        broken.cancel()
        for task in (reading, *conversations):
            task.cancel()
        await asyncio.gather(reading, *conversations, return_exceptions=True)
