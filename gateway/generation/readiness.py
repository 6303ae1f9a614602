"""Whether a gateway answers requests as well as its deployment can."""

import asyncio
from collections.abc import Collection
from typing import Literal

from gateway.workers.fleet import Fleet

DRAFTS_WITHIN_S = 60.0  # after the first target: a draft that fails must not keep the service down

Lack = Literal["no target worker is ready", "a draft worker is not ready yet", "the service is being stopped"]


class Readiness:
    """Shows balancers and operators when to send requests. Earlier requests are answered too.

    A gateway is ready once it has a target and every draft of its start, or ``DRAFTS_WITHIN_S`` after it has
    a target. A draft that is lost later does not change that.
    """

    def __init__(self, fleet: Fleet, drafts: Collection[str]) -> None:
        """drafts: names of the drafts that the deployment starts with."""
        self._fleet = fleet
        self._awaited = set(drafts)  # drafts without a worker so far
        self._target_since: float | None = None  # in the event loop's time
        self.is_leaving = False

    def lack(self) -> Lack | None:
        """What the gateway lacks to be ready; None if nothing."""
        if self.is_leaving:
            return "the service is being stopped"
        workers = self._fleet.workers()
        if not any(worker.role == "target" for worker in workers):
            return "no target worker is ready"
        now = asyncio.get_running_loop().time()
        if self._target_since is None:
            self._target_since = now
        self._awaited -= {worker.draft for worker in workers}
        if self._awaited and now < self._target_since + DRAFTS_WITHIN_S:
            return "a draft worker is not ready yet"
        return None
