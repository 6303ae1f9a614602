"""Several requests at a time, with their progress."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from workshop.checking.errors import CheckError

Progress = Callable[[str, int, int], None]  # arguments: name of the work, parts done, parts in all
T = TypeVar("T")


async def all_of(
    what: str, jobs: Sequence[Callable[[int], Awaitable[T]]], concurrency: int, progress: Progress
) -> list[T]:
    """Returns the results of the jobs, each called with its number. Raises the first failure.

    concurrency: jobs at a time.
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
