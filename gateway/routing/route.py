"""Route of a sequence: which drafter drafts it.

The loop asks for the ``current`` drafter. It says ``at`` which target the sequence is, when another drafter
may ``follow``, and when a lost worker's drafter must be replaced (``replace_lost``). The route learns
everything else from events.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gateway.events import (
    Compared,
    Drafted,
    Event,
    Events,
    FellBack,
    GuessJudged,
    Overtaken,
    Routed,
    TokenDecoded,
    VerdictReceived,
)
from gateway.routing.judge import Judge
from gateway.routing.router import CandidateDrafter, Router, TaskRule
from gateway.routing.tuning import TUNING
from gateway.sequence import GatewaySequence
from outrider.decoding.lease import Lease
from outrider.pace.controller import Pace
from outrider.pace.exploration import watch_tokens
from outrider.telemetry.reasons import DepthReason, RouteReason

logger = logging.getLogger(f"ray.serve.{__name__}")


class Route:
    """Asks the router repeatedly to choose among several candidates; a single candidate always drafts."""

    def __init__(
        self,
        candidates: Sequence[CandidateDrafter],
        router: Router,
        kind: TaskRule,
        sequence: GatewaySequence,
        events: Events,
    ) -> None:
        """candidates: possible drafters; the first drafts until more is known, and is not new."""
        self._candidates = candidates
        self._established = [candidate for candidate in candidates if not candidate.is_new] or candidates
        self._router = router
        self._kind = kind
        self._sequence = sequence
        self._events = events
        self._judge = Judge(sequence, events, self._period)
        self._now = candidates[0]
        self._pace: Pace
        self._is_paced = False  # whether the pace counts the sequence
        self._has_started = False
        self.reason: str = RouteReason.NAMED  # why the current drafter drafts
        events.add(self)

    def current(self) -> CandidateDrafter:
        """Returns the drafter that drafts now."""
        return self._now

    @contextmanager
    def at(self, pace: Pace, is_paced: bool) -> Iterator[None]:
        """Uses a target's pace while the target has the sequence.

        is_paced: whether the pace counts the sequence.
        """
        self._pace, self._is_paced = pace, is_paced
        if not self._has_started:
            self._has_started = True
            self._begin()
        if is_paced:
            pace.join(self._now.paced)
        try:
            yield
        finally:
            if is_paced:
                pace.leave(self._now.paced)
            self._is_paced = False

    def candidate(self, name: str) -> CandidateDrafter:
        """Returns the candidate of that name, or else a candidate that asks the drafter of that name."""
        named = [candidate for candidate in self._candidates if candidate.name == name]
        return (named or [candidate for candidate in self._candidates if candidate.info.asked == name])[0]

    @property
    def stays(self) -> bool:
        """Whether the current drafter should continue."""
        return self._better() is None

    async def follow(self) -> bool:
        """Switches to another drafter if that is faster; returns whether it did."""
        if (better := self._better()) is None:
            return False
        await self._take(*better)
        return True

    async def replace_lost(self) -> None:
        """Switches to another established drafter, if there is any, after the loss of a worker."""
        if self._now.is_new:
            self._router.lost(self._kind, self._now.name)
            await self._take(self._established[0], RouteReason.LOST)
        elif len(self._established) > 1:
            index = self._established.index(self._now)
            await self._take(self._established[(index + 1) % len(self._established)], RouteReason.LOST)

    @property
    def tried_with_verdict(self) -> Lease:
        """Drafter and depth of a Draft that the target must send with its next Verdict, as a guess."""
        return self._judge.tried_with_verdict

    def on(self, event: Event) -> None:
        """Tells the router which guesses are correct, and lets new tokens judge the watched drafters."""
        match event:
            case VerdictReceived():
                if event.proposal.draft:
                    chain = event.chain
                    # A Draft shorter than requested counts as a wrong guess at the next position.
                    is_short = event.proposal.draft.chain_length < event.proposal.wanted
                    reached = max(chain.reached, chain.correct + is_short)
                    self._learn(event.proposal.asked, chain.correct, reached)
                self._judge_watched()
            case TokenDecoded():
                self._judge_watched()
            case Drafted():
                self._judge.has_drafted(event.proposal.asked)
                if event.proposal.wanted and not event.proposal.draft:
                    self._learn(event.proposal.asked, 0, 1)
            case FellBack(reason=DepthReason.LATE):  # a late Draft counts as a wrong guess
                self._learn(self._now.name, 0, 1)
            case Overtaken() | Compared():
                self._learn(self._now.name, event.correct, event.reached)
            case GuessJudged():
                self._learn(event.drafter, event.correct, event.reached)

    def _learn(self, name: str, correct: int, reached: int) -> None:
        """Tells the router how many of a drafter's requested tokens are correct."""
        self._router.observe(self._kind, name, correct, reached)

    def _judge_watched(self) -> None:
        """Judges the watched drafters by the sequence's new tokens."""
        self._judge.on_tokens(takes_drafts=not self._now.info.comes_with_verdicts)

    async def aclose(self) -> None:
        """Frees what all drafters hold for the sequence."""
        for candidate in self._candidates:
            candidate.drafter.close()  # before the first await: this task may be cancelled there
        await self._judge.aclose()

    def _begin(self) -> None:
        """Chooses the first drafter, once the sequence is at its first target."""
        if len(self._candidates) > 1:
            name, self.reason = self._router.choice(self._kind, self._established, self._pace)
            self._now = self.candidate(name)
            if (new := self._router.admitted(self._kind, self._candidates, self._pace)) is not None:
                self._now, self.reason = new, RouteReason.ROLLED_OUT
            others = [candidate for candidate in self._candidates if candidate is not self._now]
            self._judge.watch(self._router.watched(self._kind, others, self._pace.settings))
        self._report()

    def _better(self) -> tuple[CandidateDrafter, str] | None:
        """Returns another drafter that should draft from now on, and the reason; None: no change.

        A drafter that has not read the text is watched first, and may take over later.
        """
        if len(self._candidates) == 1 or self._sequence.limit - len(self._sequence) < TUNING.least_left:
            return None
        if self._now.is_new and self._router.keeps(self._kind, self._now, self._candidates, self._pace):
            return None
        name, reason = self._router.choice(self._kind, self._established, self._pace)
        reason = RouteReason.WENT_BACK if self._now.is_new else reason
        if name == self._now.name:
            return None
        other = self.candidate(name)
        if self._judge.is_warm(other):
            return other, reason
        self._judge.watch([other])
        return None

    async def _take(self, candidate: CandidateDrafter, reason: str) -> None:
        await self._judge.release(candidate)
        before, self._now, self.reason = self._now, candidate, reason
        candidate.paced.length = before.paced.length
        if before.info.is_index:
            self._judge.watch([before])
        if self._is_paced:
            self._pace.leave(before.paced)
            self._pace.join(candidate.paced)
        self._report()

    def _report(self) -> None:
        logger.debug("sequence %d: %s drafts, %s", self._sequence.number, self._now.name, self.reason)
        share = self._router.share(self._kind, self._now.name) if self._now.is_new else None
        self._events.emit(Routed(self._now.name, self.reason, share))

    def _period(self, candidate: CandidateDrafter) -> int:
        """Returns the number of tokens between two guesses of a watched drafter."""
        return watch_tokens(self._pace.settings, self._router.is_known(self._kind, candidate.name))
