"""Readiness of a gateway: whether it has the workers that its deployment starts with."""

import asyncio
from collections.abc import Collection
from typing import Literal

from gateway.errors import DeadlineError
from gateway.workers.fleet import Fleet

DRAFTS_WITHIN_S = 60.0  # seconds after the first target; a failing draft must not keep the service down

POLL_S = 0.02

Missing = Literal[
    "no target worker is ready", "a draft worker is not ready yet", "the service is being stopped"
]
NO_DRAFT_YET: Missing = "a draft worker is not ready yet"


class Readiness:
    """Tells load balancers and operators when to send requests.

    A gateway is ready once it has a target and every draft that the deployment starts with, or
    ``DRAFTS_WITHIN_S`` after it has a target. It stays ready if a draft is lost later. A request that comes
    before is refused with a retry delay if there is no target. If only a draft is missing, the request waits.
    """

    def __init__(self, fleet: Fleet, drafts: Collection[str]) -> None:
        """drafts: names of the drafts that the deployment starts with."""
        self._fleet = fleet
        self._awaited = set(drafts)  # drafts without a worker so far
        self._target_since: float | None = None  # in the event loop's time
        self.is_leaving = False

    def missing(self) -> Missing | None:
        """Returns why the gateway is not ready; None: it is ready."""
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
            return NO_DRAFT_YET
        return None

    async def wait_for_drafts(self, deadline: float) -> None:
        """Waits until no initial draft is missing, or the service is being stopped.

        Otherwise a new service would answer its first request by plain decoding, its slowest mode.

        deadline: in the event loop's time.

        Raises:
            DeadlineError: a draft was still missing at the deadline.
        """
        try:
            async with asyncio.timeout_at(deadline):
                while self.missing() == NO_DRAFT_YET:
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"{NO_DRAFT_YET}, and the request waited for it until its deadline"
            ) from error
