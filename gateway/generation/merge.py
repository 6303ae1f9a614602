"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class End:
    """End of one stream."""

    error: Exception | None  # what it raised


async def merged(
    streams: Iterable[AsyncGenerator[ItemT, None]], deadline: float | None = None
) -> AsyncGenerator[ItemT, None]:
    """Items as they come. What one stream raises ends all; a reader that pauses pauses them.

    A stream whose item nobody takes until the deadline, a time of the event loop, is closed. Whoever reads
    then gets a TimeoutError.

    Each stream runs in a task of its own and so cleans up undisturbed: a web framework that cancels a reader
    does so again at every await until it is gone.
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
        # Not gather: cancelled once more, it would cancel them once more too.
        await asyncio.wait(draining)
