"""Runs several requests at a time and reports progress."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from workshop.checking.errors import CheckError

Progress = Callable[[str, int, int], None]  # arguments: name of the work, parts done, total of parts
T = TypeVar("T")


async def all_of(
    what: str, jobs: Sequence[Callable[[int], Awaitable[T]]], concurrency: int, progress: Progress
) -> list[T]:
    """Runs the jobs, each called with its number, and returns their results. Raises the first CheckError.

    concurrency: most jobs at a time.
    """
    places, done = asyncio.Semaphore(concurrency), 0
    progress(what, 0, len(jobs))

    async def one(number: int) -> T:
        nonlocal done
        async with places:
            result = await jobs[number](number)
        done += 1
        progress(what, done, len(jobs))
        return result

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(number)) for number in range(len(jobs))]
    except* CheckError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]
