"""How many requests are worked on at a time, and how many may wait for their turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import DeadlineError, OverloadedError, WorkerLostError
from outrider.learning.mean import Mean

STOPPING = "the service is being stopped: ask again later, with the seed"
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
DURATION_MEMORY = 10.0  # requests: 1/e after these in the mean duration


class Admission:
    """Bounded queue before a bounded number of slots. Requests inside leave early only if it is closed."""

    def __init__(self, max_requests: int, max_waiting: int) -> None:
        self._slots = asyncio.Semaphore(max_requests)
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._duration_s = Mean(SHORTEST_RETRY_S, DURATION_MEMORY)
        self.running = 0
        self.waiting = 0
        self._idle = asyncio.Event()  # set while no request runs or waits
        self._idle.set()
        self._is_closed = False

    @asynccontextmanager
    async def slot(self, deadline: float) -> AsyncIterator[None]:
        """Holds a slot for a request, in order of arrival, at most until ``deadline``.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: no slot was free before ``deadline``, a time of the event loop.
            WorkerLostError: the queue is closed, or was while the request waited.
        """
        if self._is_closed:
            raise WorkerLostError(STOPPING)
        if self._slots.locked() and self.waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.running} requests run and {self.waiting} wait, more are not accepted",
                self.retry_after_s(),
            )
        self.waiting += 1
        self._idle.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError as error:
            raise DeadlineError("the request waited in the queue until its deadline") from error
        else:
            if self._is_closed:
                raise WorkerLostError(STOPPING)
            self.running += 1
        finally:
            self.waiting -= 1
            self._notice_idleness()
        loop = asyncio.get_running_loop()
        began, is_free = loop.time(), False

        def leave() -> None:
            nonlocal is_free
            if is_free:
                return
            is_free = True
            self.running -= 1
            self._notice_idleness()
            self._slots.release()
            self._duration_s.observe(loop.time() - began)

        leaving = loop.call_at(deadline, leave)  # a slow reader may hold the request up
        try:
            yield
        finally:
            leaving.cancel()
            leave()

    def close(self) -> None:
        """Refuses all requests that wait, and all later requests."""
        self._is_closed = True
        for _ in range(self.waiting):
            self._slots.release()

    async def idle(self) -> None:
        """Returns once no request runs or waits."""
        await self._idle.wait()

    def _notice_idleness(self) -> None:
        if not self.running and not self.waiting:
            self._idle.set()

    def retry_after_s(self) -> float:
        """Returns the seconds in which the present queue is about served."""
        estimate = self._duration_s.value * (self.waiting + 1) / self._max_requests
        return min(max(estimate, SHORTEST_RETRY_S), LONGEST_RETRY_S)
