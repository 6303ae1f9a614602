"""Merges several streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from gateway.errors import DeadlineError

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class End:
    """End of one stream."""

    error: Exception | None  # exception that the stream raised


async def merged(
    streams: Iterable[AsyncGenerator[ItemT, None]], deadline: float | None = None
) -> AsyncGenerator[ItemT, None]:
    """Yields items as they come. An error in a stream ends all streams; a slow reader pauses them.

    Each stream runs in a task of its own, so nothing disturbs its clean-up. A web framework that cancels a
    reader cancels it again at every await until the reader is gone.

    deadline: in the event loop's time.

    Raises:
        DeadlineError: the reader did not take an item before the deadline; its stream was closed.
    """
    items: asyncio.Queue[ItemT | End] = asyncio.Queue(maxsize=1)

    async def drain(stream: AsyncGenerator[ItemT, None]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    if not items.full():
                        items.put_nowait(item)
                        continue
                    async with asyncio.timeout_at(deadline):
                        await items.put(item)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = RuntimeError("a stream was cancelled from within")
        except TimeoutError:
            error = DeadlineError("the answer was not read before the request's deadline")
        except Exception as raised:
            error = raised
        await items.put(End(error))

    draining = [asyncio.create_task(drain(stream)) for stream in streams]
    unfinished = len(draining)
    try:
        while unfinished:
            item = await items.get()
            if not isinstance(item, End):
                yield item
                continue
            if item.error is not None:
                raise item.error
            unfinished -= 1
    finally:
        for task in draining:
            task.cancel()
        # Not gather: a second cancellation of this task would cancel the streams a second time.
        await asyncio.wait(draining)
