"""Order of the requests that wait for a permit.

Interactive requests come before batch requests. Within a priority, the next tenant is the tenant with the
fewest served tokens relative to its weight (virtual token counters, arXiv 2401.00588). Of its requests, the
request with the lowest order number is next, then the oldest request. With a single tenant and no order
numbers, requests are served in order of arrival.
"""

from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

from gateway.tenants.tenant import Claim, Tenant

PROMOTED_AFTER_S = 30.0  # seconds; a batch request that has waited for longer counts as interactive


class Waiting:
    """A request in the queue."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.since = 0.0  # seconds of the queue's clock when it began to wait
        self.number: int | None = None  # order of arrival; None: not queued yet
        self.charge = claim.expected  # tokens that are charged to its tenant once it is served

    def place(self, now: float) -> tuple[bool, float, int, int]:
        """Returns its sort key in the queue at that time; the lowest key is served first."""
        assert self.number is not None
        is_promoted = now - self.since > PROMOTED_AFTER_S
        is_behind = self.claim.priority == "batch" and not is_promoted
        order = min(self.claim.order, 0) if is_promoted else self.claim.order
        return is_behind, self.claim.tenant.served, order, self.number


WaitingT = TypeVar("WaitingT", bound=Waiting)


class FairQueue(Generic[WaitingT]):
    """Queue of requests. All times are seconds of one clock."""

    def __init__(self) -> None:
        self._waiting: list[WaitingT] = []
        self._numbers = count()
        self._newest: Tenant | None = None  # tenant that was served last

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingT]:
        return iter([*self._waiting])

    def put(self, waiting: WaitingT, now: float) -> None:
        """Adds a request. A request that was in the queue before keeps its number.

        A tenant that returns is lifted to the least served tenant that waits, so a pause earns no credit.
        """
        tenant = waiting.claim.tenant
        tenants = [other.claim.tenant for other in self._waiting]
        if tenant not in tenants:
            others = tenants or ([] if self._newest is None else [self._newest])
            tenant.served = max(tenant.served, min((other.served for other in others), default=0.0))
        waiting.since = now
        if waiting.number is None:
            waiting.number = next(self._numbers)
        self._waiting.append(waiting)

    def remove(self, waiting: WaitingT) -> bool:
        """Removes a request; returns whether it was in the queue."""
        is_there = waiting in self._waiting
        if is_there:
            self._waiting.remove(waiting)
        return is_there

    def pop(self, now: float) -> WaitingT:
        """Removes and returns the next request, and charges its tenant."""
        served = min(self._waiting, key=lambda waiting: waiting.place(now))
        self._waiting.remove(served)
        self._newest = tenant = served.claim.tenant
        tenant.served += served.charge / tenant.weight
        return served
