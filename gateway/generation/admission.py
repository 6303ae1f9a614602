"""How many requests are worked on at a time, and how many may wait for their turn."""

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
DURATION_MEMORY = 10.0  # requests: 1/e after these in the mean duration
LEAST_TURN = 256  # tokens of a request that was parked, before it may be parked again

logger = logging.getLogger(f"ray.serve.{__name__}")


class Slot(Waiting):
    """Slot of one request, from its arrival on."""

    def __init__(self, claim: Claim, parking: Parking | None) -> None:
        """parking: what parks the request; None: it keeps its slot."""
        super().__init__(claim)
        self.parking = parking
        self.is_served = asyncio.get_running_loop().create_future()
        self.began: float | None = None  # the event loop's time when it was first served
        self.turn_tokens = 0  # tokens since it was last served
        self.was_parked = False

    @property
    def may_be_parked(self) -> bool:
        """Whether an interactive request may take its slot."""
        is_due = self.turn_tokens >= LEAST_TURN or not self.was_parked
        return self.parking is not None and self.claim.priority == "batch" and is_due


class Admission:
    """Bounded queue before a bounded number of slots. Parked requests are in the queue as well.

    A batch request may lose its slot to an interactive request, and goes on later. All other requests inside
    leave early only if the queue is closed.
    """

    def __init__(self, max_requests: int, max_waiting: int) -> None:
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._duration_s = Mean(SHORTEST_RETRY_S, DURATION_MEMORY)
        self._unnamed = Tenant(UNNAMED)
        self._queue = FairQueue[Slot]()
        self._running: list[Slot] = []
        self.waiting = 0
        self.parked = 0
        self._idle = asyncio.Event()  # set while no request runs, waits or is parked
        self._idle.set()
        self._is_closed = False

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def under_way(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.running + self.waiting + self.parked

    @asynccontextmanager
    async def slot(
        self, deadline: float, claim: Claim | None = None, parking: Parking | None = None
    ) -> AsyncIterator[Slot]:
        """Holds a slot for a request, in the order of the queue, at most until ``deadline``.

        Args:
            claim: None: the request waits in order of arrival.
            parking: what parks the request; None: it keeps its slot.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: no slot was free before ``deadline``, a time of the event loop.
            WorkerLostError: the queue is closed, or was while the request waited.
        """
        if self._is_closed:
            raise WorkerLostError(STOPPING)
        slot = Slot(claim or Claim(self._unnamed), parking)
        waiting = self._waiting_before(slot)
        if self.running == self._max_requests and waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.running} requests run and {waiting} wait, more are not accepted",
                self.retry_after_s(),
            )
        loop = asyncio.get_running_loop()
        self.waiting += 1
        self._idle.clear()
        self._queue.put(slot, loop.time())
        self._serve()
        if slot.began is None and slot.claim.priority == "interactive":
            self._make_room()
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await slot.is_served
            except TimeoutError as error:
                raise DeadlineError("the request waited in the queue until its deadline") from error
            if self._is_closed:
                raise WorkerLostError(STOPPING)
            leaving = loop.call_at(deadline, self._leave, slot)  # a slow reader may hold the request up
            try:
                yield slot
            finally:
                leaving.cancel()
        finally:
            self._leave(slot)

    def _waiting_before(self, slot: Slot) -> int:
        """Returns how many requests in the queue are as urgent: batch refuses nothing interactive."""
        if slot.claim.priority == "batch":
            return len(self._queue)
        return sum(waiting.claim.priority == "interactive" for waiting in self._queue)

    def count(self, slot: Slot, tokens: int) -> None:
        """Counts committed tokens of a request that has a slot."""
        was_due = slot.may_be_parked
        slot.turn_tokens += tokens
        slot.claim.add(tokens)
        if slot.may_be_parked and not was_due:
            self._make_room()

    def _serve(self) -> None:
        """Gives free slots to the requests that are next."""
        now = asyncio.get_running_loop().time()
        while self._queue and self.running < self._max_requests:
            slot = self._queue.pop(now)
            if slot.began is None:
                self.waiting -= 1
                if slot.is_served.done():
                    continue  # it is about to leave
                slot.is_served.set_result(None)
                slot.began = now
                slot.claim.begin(now - slot.since)
            else:
                self.parked -= 1
                assert slot.parking is not None
                slot.parking.resume()
            self._running.append(slot)
        if not self.under_way:
            self._idle.set()

    def _make_room(self) -> None:
        """Parks the batch request with the fewest tokens since it was served, if a request needs its slot."""
        waits = any(
            slot.claim.priority == "interactive" and not slot.is_served.done() for slot in self._queue
        )
        parkable = [slot for slot in self._running if slot.may_be_parked]
        if not waits or not parkable:
            return
        slot = min(parkable, key=lambda slot: slot.turn_tokens)
        assert slot.parking is not None
        slot.parking.park()
        logger.debug("a request is parked after %d tokens, %d wait", slot.turn_tokens, len(self._queue))
        slot.was_parked, slot.turn_tokens, slot.charge = True, 0, 0.0
        slot.claim.tenant.counts.parked += 1
        self._running.remove(slot)
        self.parked += 1
        self._queue.put(slot, asyncio.get_running_loop().time())
        self._serve()

    def _leave(self, slot: Slot) -> None:
        """Ends a request, wherever it is. A second call changes nothing."""
        now = asyncio.get_running_loop().time()
        is_running = slot in self._running
        if is_running:
            self._running.remove(slot)
        elif not self._queue.remove(slot):
            return
        if slot.began is None:
            self.waiting -= 1
        else:
            self.parked -= not is_running
            tenant = slot.claim.tenant
            tenant.served += (slot.claim.used - slot.claim.expected) / tenant.weight
            self._duration_s.observe(now - slot.began)
        self._serve()

    def close(self) -> None:
        """Refuses all requests that wait, and all later requests. Parked requests keep their place."""
        self._is_closed = True
        for slot in self._queue:
            if slot.began is None:
                self._leave(slot)
                if not slot.is_served.done():
                    slot.is_served.set_result(None)

    async def idle(self) -> None:
        """Returns once no request runs, waits or is parked."""
        await self._idle.wait()

    def retry_after_s(self) -> float:
        """Returns the seconds in which the present queue is about served."""
        estimate = self._duration_s.value * (len(self._queue) + 1) / self._max_requests
        return min(max(estimate, SHORTEST_RETRY_S), LONGEST_RETRY_S)
