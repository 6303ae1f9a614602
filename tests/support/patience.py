"""Time limits after which another process counts as hanging.

The limits cost nothing if all is well, so they are generous: they fit two busy cores. For a slower machine,
``OUTRIDER_PATIENCE`` multiplies all limits.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable

PATIENCE = float(os.environ.get("OUTRIDER_PATIENCE", "1"))
LIMIT_S = 90.0 * PATIENCE  # for processes that run already
START_S = 300.0 * PATIENCE  # for processes that start or restart
POLL_S = 0.05


def wait_until(
    condition: Callable[[], object],
    seconds: float = LIMIT_S,
    what: Callable[[], str] = lambda: "it is not so",
) -> None:
    """Waits until a condition is true. Raises TimeoutError with the words of ``what`` after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s {what()}; OUTRIDER_PATIENCE raises the limit")
        time.sleep(POLL_S)


async def eventually(condition: Callable[[], object], seconds: float = LIMIT_S) -> None:
    """Waits until a condition is true, while the event loop runs other tasks. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def patient(options: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Returns gRPC options with a long ping timeout, so that no peer counts as lost on a busy processor."""
    return tuple(
        (name, 1000 * round(LIMIT_S) if "ping_timeout" in name else value) for name, value in options
    )


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
