"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def merged(streams: Iterable[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[ItemT, None]:
    """Items as they come. What one stream raises ends all; a reader that pauses pauses them.

    Each stream runs in a task of its own and so cleans up undisturbed: a web framework that cancels a reader
    does so again at every await until it is gone.
    """
    items: asyncio.Queue[ItemT] = asyncio.Queue(maxsize=1)

    async def drain(stream: AsyncGenerator[ItemT, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await items.put(item)

    draining = {asyncio.create_task(drain(stream)) for stream in streams}
    item = asyncio.create_task(items.get())
    try:
        while draining or not items.empty():
            await asyncio.wait({item, *draining}, return_when=asyncio.FIRST_COMPLETED)
            finished = {task for task in draining if task.done()}
            draining -= finished
            if item.done():
                yield item.result()
                item = asyncio.create_task(items.get())
            for task in finished:
                task.result()
    finally:
        item.cancel()
        for draining_task in draining:
            draining_task.cancel()
        # Not gather: cancelled once more, it would cancel them once more too.
        await asyncio.wait({item, *draining})
