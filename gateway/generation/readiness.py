"""Whether a gateway answers requests as well as its deployment can."""

import asyncio
from collections.abc import Collection
from typing import Literal

from gateway.errors import DeadlineError
from gateway.workers.fleet import Fleet

DRAFTS_WITHIN_S = 60.0  # after the first target: a draft that fails must not keep the service down

POLL_S = 0.02

Missing = Literal[
    "no target worker is ready", "a draft worker is not ready yet", "the service is being stopped"
]
NO_DRAFT_YET: Missing = "a draft worker is not ready yet"


class Readiness:
    """Shows balancers and operators when to send requests.

    A gateway is ready once it has a target and every draft of its start, or ``DRAFTS_WITHIN_S`` after it has
    a target. The later loss of a draft does not change that. A request that comes earlier is refused
    if there is no target, with a delay after which to ask again. If only a draft is missing, it waits.
    """

    def __init__(self, fleet: Fleet, drafts: Collection[str]) -> None:
        """drafts: names of the drafts that the deployment starts with."""
        self._fleet = fleet
        self._awaited = set(drafts)  # drafts without a worker so far
        self._target_since: float | None = None  # in the event loop's time
        self.is_leaving = False

    def missing(self) -> Missing | None:
        """What the gateway needs to be ready; None: nothing."""
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
        """Returns once no draft of the start is awaited, or the service is being stopped.

        A new service would otherwise answer its first request plainly, and so at its slowest.

        deadline: the event loop's time.

        Raises:
            DeadlineError: a draft was awaited until then.
        """
        try:
            async with asyncio.timeout_at(deadline):
                while self.missing() == NO_DRAFT_YET:
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"{NO_DRAFT_YET}, and the request waited for it until its deadline"
            ) from error
