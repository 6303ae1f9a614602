"""How long another process is waited for before it counts as hanging.

The limits cost nothing where all is well, so they are those of two busy cores. A slower machine raises them
all with ``OUTRIDER_PATIENCE``, a factor.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable

PATIENCE = float(os.environ.get("OUTRIDER_PATIENCE", "1"))
LIMIT_S = 90.0 * PATIENCE  # for what runs already
START_S = 300.0 * PATIENCE  # for processes that are to start, or to start again
POLL_S = 0.05


def wait_until(
    condition: Callable[[], object],
    seconds: float = LIMIT_S,
    what: Callable[[], str] = lambda: "it is not so",
) -> None:
    """Raises TimeoutError, which says ``what`` is wrong, if the condition has not come about by then."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s {what()}; OUTRIDER_PATIENCE raises the limit")
        time.sleep(POLL_S)


async def eventually(condition: Callable[[], object], seconds: float = LIMIT_S) -> None:
    """The same in an event loop, whose tasks run on meanwhile."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def patient(options: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """gRPC's, for a test in which no peer is to count as lost because other work has its processor."""
    return tuple(
        (name, 1000 * round(LIMIT_S) if "ping_timeout" in name else value) for name, value in options
    )


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
