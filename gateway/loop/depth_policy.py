"""Depth of a sequence's next Draft, and the drafter that makes it, as long as the drafter can be asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.events import Events
from gateway.routing.paces import PaceObserver
from gateway.routing.route import Route
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.lease import Lease
from outrider.drafters.registry import DrafterInfo
from outrider.pace.controller import Pace
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import MAX_DEPTH
from outrider.telemetry.reasons import DepthReason


class DepthPolicy:
    """Combines the request's settings, the target's pace and the route. ``depth`` is a query."""

    def __init__(
        self, sequence: GatewaySequence, route: Route, speculation: Speculation, events: Events
    ) -> None:
        """speculation: resolved settings of the request."""
        self._sequence = sequence
        self._route = route
        self._mode = speculation.mode
        self._observer = PaceObserver(route, sequence)
        events.add(self._observer)

    @contextmanager
    def at(self, pace: Pace) -> Iterator[None]:
        """Lets a target's pace decide while the target has the sequence."""
        self._observer.pace = pace
        if self._mode == "off":
            yield
            return
        with self._route.at(pace, is_paced=self._mode == "auto"):
            yield

    @property
    def pace(self) -> Pace:
        """Pace of the target that has the sequence."""
        assert self._observer.pace is not None
        return self._observer.pace

    @property
    def paced(self) -> PacedSequence:
        """State of the sequence in the pace, with the current drafter."""
        return self._route.current().paced

    @property
    def info(self) -> DrafterInfo:
        """Row of the current drafter."""
        return self._route.current().info

    @property
    def room(self) -> int:
        """Number of tokens that a Draft may have: the Verdict adds the target's own token."""
        return max(self._sequence.limit - len(self._sequence) - 1, 0)

    def depth(self) -> tuple[int, str]:
        """Returns the depth of the next Draft, 0 for plain decoding, and its reason.

        The reason is a DepthReason, or a reason of the pace.
        """
        if self._observer.pace is None:
            return 0, DepthReason.OFF  # no target has had the sequence yet
        if self.room == 0:
            return 0, DepthReason.LAST_TOKEN
        if self._mode == "fixed":
            return min(self.paced.max_depth, self.room), DepthReason.FIXED
        return min(self.pace.depth(self.paced), self.room), self.pace.reason(self.paced)

    @property
    def wanted_with_verdict(self) -> Lease:
        """Drafter, depth and most alternatives of the Draft that the target makes after the next Verdict."""
        tried = self._route.tried_with_verdict
        if self._mode == "off" or not self.info.comes_with_verdicts:
            return tried
        depth = self.paced.max_depth if self._mode == "fixed" else self.pace.depth_in_rounds(self.paced)
        decision, drafter = self.paced.decision, tried.drafter or self.info.name
        # A trial shows all guesses, likely or not.
        least_survival = decision.least_survival if decision.depth and not tried.drafter else 0.0
        return Lease(0, depth, decision.alternatives, drafter, least_survival)

    @property
    def asked_depth(self) -> int:
        """Requested depth of a target's Draft; an index that is united with it may guess deeper."""
        return self.wanted_with_verdict.depth if self.info.is_united else MAX_DEPTH

    @property
    def target_may_continue(self) -> bool:
        """Whether the target makes all Drafts, and the next Draft is more than a trial."""
        depth = self.paced.max_depth if self._mode == "fixed" else self.paced.depth
        return self.info.comes_with_verdicts and depth > 0

    @property
    def may_draft(self) -> bool:
        """Whether the settings and the request allow Drafts."""
        return self._mode != "auto" or self.pace.may_draft(self.paced)

    @property
    def starts_with_drafts(self) -> bool:
        """Whether the drafter must prefill the prompt at the same time as the target."""
        return self._mode != "auto" or self.pace.may_pay(self.paced)

    def pays(self) -> bool:
        """Returns whether the next turn should be a round, by the pace's newest observations."""
        self.pace.refresh()
        return self._mode == "fixed" or self.pace.may_pay(self.paced)
