"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def merged(streams: Iterable[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[ItemT, None]:
    """Items as they come. What one stream raises ends all; a reader that pauses pauses them."""
    items: asyncio.Queue[ItemT] = asyncio.Queue(maxsize=1)

    async def drain(stream: AsyncGenerator[ItemT, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await items.put(item)

    draining = {asyncio.create_task(drain(stream)) for stream in streams}
    try:
        while draining or not items.empty():
            item = asyncio.create_task(items.get())
            await asyncio.wait({item, *draining}, return_when=asyncio.FIRST_COMPLETED)
            finished = {task for task in draining if task.done()}
            draining -= finished
            if item.done():
                yield item.result()
            else:
                item.cancel()
            for task in finished:
                task.result()
    finally:
        for task in draining:
            task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)
