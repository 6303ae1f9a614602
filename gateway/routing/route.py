"""Which drafter drafts one sequence, and which ones are judged by its text."""

from collections.abc import Sequence

from gateway.events import Events, Routed
from gateway.routing.candidates import Candidate
from gateway.routing.judge import Judge
from gateway.routing.router import Kind, Router
from gateway.sequence import GatewaySequence
from outrider.pace.controller import Pace
from outrider.pace.exploration import watch_tokens
from outrider.pace.settings import PaceSettings
from outrider.telemetry.reasons import RouteReason

WORTH = 64  # tokens left to generate for which another drafter is taken


class Route:
    """Over several candidates the router decides, again and again; a single one drafts in any case."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        router: Router,
        kind: Kind,
        sequence: GatewaySequence,
        events: Events,
    ) -> None:
        """candidates: the first one drafts until more is known, and is not new."""
        self._candidates = candidates
        self._established = [one for one in candidates if not one.is_new] or candidates
        self._router = router
        self._kind = kind
        self._sequence = sequence
        self._events = events
        self._judge = Judge(sequence, events, self._period)
        self._settings: PaceSettings | None = None  # those in force when it began
        self.now = candidates[0]
        self.reason: str = RouteReason.NAMED  # for which that one drafts
        self._has_begun = False

    def begin(self, pace: Pace) -> None:
        """At the first target."""
        if self._has_begun:
            return
        self._has_begun = True
        if len(self._candidates) > 1:
            name, self.reason = self._router.choice(self._kind, self._established, pace)
            self.now = self.candidate(name)
            if (new := self._router.admitted(self._kind, self._candidates, pace)) is not None:
                self.now, self.reason = new, RouteReason.ROLLED_OUT
            self._settings = pace.settings
            others = [one for one in self._candidates if one is not self.now]
            self._judge.watch(self._router.watched(self._kind, others, pace.settings))
        self._tell()

    def candidate(self, name: str) -> Candidate:
        return next(one for one in self._candidates if one.name == name)

    def better(self, pace: Pace) -> tuple[Candidate, str] | None:
        """Another that should draft from now on, and why; one that has not taken the text in begins to."""
        if len(self._candidates) == 1 or self._sequence.limit - len(self._sequence) < WORTH:
            return None
        if self.now.is_new and self._router.keeps(self._kind, self.now, self._candidates, pace):
            return None
        name, reason = self._router.choice(self._kind, self._established, pace)
        reason = RouteReason.WENT_BACK if self.now.is_new else reason
        if name == self.now.name:
            return None
        other = self.candidate(name)
        if self._judge.is_warm(other):
            return other, reason
        self._judge.watch([other])
        return None

    def substitute(self) -> tuple[Candidate, str] | None:
        """Another for one that is lost; none that is new."""
        if self.now.is_new:
            self._router.lost(self._kind, self.now.name)
            return self._established[0], RouteReason.LOST
        if len(self._established) == 1:
            return None
        index = self._established.index(self.now)
        return self._established[(index + 1) % len(self._established)], RouteReason.LOST

    async def take(self, candidate: Candidate, reason: str) -> None:
        """It drafts from now on."""
        await self._judge.release(candidate)
        before, self.now, self.reason = self.now, candidate, reason
        candidate.paced.length = before.paced.length
        if before.info.is_index:
            self._judge.watch([before])
        self._tell()

    @property
    def depth_beside_target(self) -> int:
        """Of a Draft that is to come with the next Verdict only to be judged; 0: none."""
        return self._judge.depth_beside_target

    def grew(self) -> None:
        """The sequence has more tokens."""
        self._judge.grew()

    def observe(self, name: str, right: int, verified: int) -> None:
        """Of tokens that the drafter was asked for."""
        self._router.observe(self._kind, name, right, verified)

    async def aclose(self) -> None:
        """Frees what all drafters hold for the sequence."""
        for candidate in self._candidates:
            candidate.drafter.close()  # whoever waits for what follows may be cancelled
        await self._judge.aclose()

    def _tell(self) -> None:
        share = self._router.share(self._kind, self.now.name) if self.now.is_new else None
        self._events.emit(Routed(self.now.name, self.reason, share))

    def _period(self, candidate: Candidate) -> int:
        """Tokens from one guess of a watched drafter to its next."""
        assert self._settings is not None
        return watch_tokens(self._settings, self._router.is_known(self._kind, candidate.name))
