"""How many requests are worked on at a time, and how many may wait for their turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import DeadlineError, OverloadedError

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
FORGETTING = 0.1  # weight of the newest request in the mean duration


class Admission:
    """A bounded queue before a bounded number of places. Whoever was let in is never put out."""

    def __init__(self, max_requests: int, max_waiting: int) -> None:
        self._places = asyncio.Semaphore(max_requests)
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._mean_duration_s = SHORTEST_RETRY_S
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def place(self, deadline: float) -> AsyncIterator[None]:
        """A place for one request, in order of arrival; it is free again at ``deadline``, if not before.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: no place was free before ``deadline``, a time of the running event loop.
        """
        if self._places.locked() and self.waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.running} requests run and {self.waiting} wait, more are not accepted",
                self.retry_after_s(),
            )
        self.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError as error:
            raise DeadlineError("the request waited in the queue until its deadline") from error
        finally:
            self.waiting -= 1
        loop = asyncio.get_running_loop()
        began, is_free = loop.time(), False

        def leave() -> None:
            nonlocal is_free
            if is_free:
                return
            is_free = True
            self.running -= 1
            self._places.release()
            self._mean_duration_s += FORGETTING * (loop.time() - began - self._mean_duration_s)

        self.running += 1
        leaving = loop.call_at(deadline, leave)  # whoever has the place may be held up by a slow reader
        try:
            yield
        finally:
            leaving.cancel()
            leave()

    def retry_after_s(self) -> float:
        """Until about when the queue as it stands has been served."""
        estimate = self._mean_duration_s * (self.waiting + 1) / self._max_requests
        return min(max(estimate, SHORTEST_RETRY_S), LONGEST_RETRY_S)
