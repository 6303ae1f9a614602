"""Admission control: how many requests run at a time, and how many may wait."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import DeadlineError, OverloadedError, WorkerLostError
from gateway.generation.fair_queue import FairQueue, Waiting
from gateway.loop.parking import Parking
from gateway.tenants.tenant import UNNAMED, Claim, Tenant
from outrider.learning.mean import Mean

STOPPING = "the service is being stopped: ask again later, with the seed"
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
DURATION_MEMORY = 10.0  # requests; memory of the moving average of durations
MIN_TURN = 256  # tokens that a request must get after it was parked, before it may be parked again

logger = logging.getLogger(f"ray.serve.{__name__}")


class Permit(Waiting):
    """Permit of one request, or its place in the queue for a permit."""

    def __init__(self, claim: Claim, parking: Parking | None) -> None:
        """parking: parks the request; None: the request keeps its permit."""
        super().__init__(claim)
        self.parking = parking
        self.is_served = asyncio.get_running_loop().create_future()
        self.began: float | None = None  # the event loop's time when it was first served
        self.turn_tokens = 0  # tokens since it was last served
        self.was_parked = False

    @property
    def may_be_parked(self) -> bool:
        """Whether an interactive request may take this permit."""
        is_due = self.turn_tokens >= MIN_TURN or not self.was_parked
        return self.parking is not None and self.claim.priority == "batch" and is_due


class Admission:
    """Bounded queue before a bounded number of permits. Parked requests are in the queue as well.

    A batch request may lose its permit to an interactive request, and continues later. Any other accepted
    request is ended early only if the queue is closed.
    """

    def __init__(self, max_requests: int, max_waiting: int) -> None:
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._duration_s = Mean(SHORTEST_RETRY_S, DURATION_MEMORY)
        self._unnamed = Tenant(UNNAMED)
        self._queue = FairQueue[Permit]()
        self._running: list[Permit] = []
        self.waiting = 0
        self.parked = 0
        self._idle = asyncio.Event()  # set while no request runs, waits or is parked
        self._idle.set()
        self._is_closed = False

    @property
    def running(self) -> int:
        """Number of requests that have a permit."""
        return len(self._running)

    @property
    def under_way(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return self.running + self.waiting + self.parked

    @asynccontextmanager
    async def permit(
        self, deadline: float, claim: Claim | None = None, parking: Parking | None = None
    ) -> AsyncIterator[Permit]:
        """Waits for a permit in the order of the queue, and holds it at most until ``deadline``.

        Args:
            claim: claim of the request; None: requests are served in order of arrival.
            parking: parks the request; None: the request keeps its permit.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: no permit was free before ``deadline``, in the event loop's time.
            WorkerLostError: the queue is closed, or was closed while the request waited.
        """
        if self._is_closed:
            raise WorkerLostError(STOPPING)
        permit = Permit(claim or Claim(self._unnamed), parking)
        waiting = self._waiting_before(permit)
        if self.running == self._max_requests and waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.running} requests run and {waiting} wait, more are not accepted",
                self.retry_after_s(),
            )
        loop = asyncio.get_running_loop()
        self.waiting += 1
        self._idle.clear()
        self._queue.put(permit, loop.time())
        self._serve()
        if permit.began is None and permit.claim.priority == "interactive":
            self._make_room()
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await permit.is_served
            except TimeoutError as error:
                raise DeadlineError("the request waited in the queue until its deadline") from error
            if self._is_closed:
                raise WorkerLostError(STOPPING)
            leaving = loop.call_at(deadline, self._leave, permit)  # a slow reader may delay the request
            try:
                yield permit
            finally:
                leaving.cancel()
        finally:
            self._leave(permit)

    def _waiting_before(self, permit: Permit) -> int:
        """Returns how many requests in the queue count against this request's admission.

        Only interactive requests count for an interactive request, so batch requests never get it refused.
        """
        if permit.claim.priority == "batch":
            return len(self._queue)
        return sum(waiting.claim.priority == "interactive" for waiting in self._queue)

    def count(self, permit: Permit, tokens: int) -> None:
        """Counts committed tokens of a request that has a permit."""
        was_due = permit.may_be_parked
        permit.turn_tokens += tokens
        permit.claim.add(tokens)
        if permit.may_be_parked and not was_due:
            self._make_room()

    def _serve(self) -> None:
        """Gives free permits to the next requests of the queue."""
        now = asyncio.get_running_loop().time()
        while self._queue and self.running < self._max_requests:
            permit = self._queue.pop(now)
            if permit.began is None:
                self.waiting -= 1
                if permit.is_served.done():
                    continue  # it was cancelled, and is about to leave
                permit.is_served.set_result(None)
                permit.began = now
                permit.claim.begin(now - permit.since)
            else:
                self.parked -= 1
                assert permit.parking is not None
                permit.parking.resume()
            self._running.append(permit)
        if not self.under_way:
            self._idle.set()

    def _make_room(self) -> None:
        """Parks the batch request with the fewest tokens in its turn, if an interactive request waits."""
        waits = any(
            permit.claim.priority == "interactive" and not permit.is_served.done() for permit in self._queue
        )
        parkable = [permit for permit in self._running if permit.may_be_parked]
        if not waits or not parkable:
            return
        permit = min(parkable, key=lambda permit: permit.turn_tokens)
        assert permit.parking is not None
        permit.parking.park()
        logger.debug("a request is parked after %d tokens, %d wait", permit.turn_tokens, len(self._queue))
        permit.was_parked, permit.turn_tokens, permit.charge = True, 0, 0.0
        permit.claim.tenant.counts.parked += 1
        self._running.remove(permit)
        self.parked += 1
        self._queue.put(permit, asyncio.get_running_loop().time())
        self._serve()

    def _leave(self, permit: Permit) -> None:
        """Ends a request, whether it runs, waits or is parked. Idempotent."""
        now = asyncio.get_running_loop().time()
        is_running = permit in self._running
        if is_running:
            self._running.remove(permit)
        elif not self._queue.remove(permit):
            return
        if permit.began is None:
            self.waiting -= 1
        else:
            self.parked -= not is_running
            tenant = permit.claim.tenant
            tenant.served += (permit.claim.used - permit.claim.expected) / tenant.weight
            self._duration_s.observe(now - permit.began)
        self._serve()

    def close(self) -> None:
        """Refuses all waiting requests and all later requests. Parked requests keep their place."""
        self._is_closed = True
        for permit in self._queue:
            if permit.began is None:
                self._leave(permit)
                if not permit.is_served.done():
                    permit.is_served.set_result(None)

    async def idle(self) -> None:
        """Waits until no request runs, waits or is parked."""
        await self._idle.wait()

    def retry_after_s(self) -> float:
        """Returns the estimated seconds until the present queue is served."""
        estimate = self._duration_s.value * (len(self._queue) + 1) / self._max_requests
        return min(max(estimate, SHORTEST_RETRY_S), LONGEST_RETRY_S)
