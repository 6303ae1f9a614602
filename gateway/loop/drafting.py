"""The Drafts of one sequence: how deep, how long to wait for one, when to begin again."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from gateway.drafters.drafter import SequenceDrafter
from gateway.drafters.waiting import waits_for_this_task
from gateway.errors import SequenceLostError, WorkerLostError
from gateway.events import Compared, Drafted, Events, FellBack, Overtaken, Resumed
from gateway.loop.growth import Growth
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.paces import PaceObserver
from gateway.routing.route import Route
from gateway.routing.tuning import TUNING as ROUTING_TUNING
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.draft import agreed
from outrider.pace.controller import Pace
from outrider.pace.sequence import PacedSequence
from outrider.pace.tuning import TUNING
from outrider.telemetry.reasons import DepthReason

logger = logging.getLogger("ray.serve")

MANY_EMPTY = 4  # Drafts without a token, in a row, that end rounds
SHORTEST_PAUSE, DOUBLINGS = 16, 6  # tokens of plain decoding before another is asked for, doubled each time
MOST_LOSSES = 3  # of draft workers with one sequence, without a Draft in between
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0  # without drafts, from a second failure in a row on, doubled


class Drafting:
    """A drafter that is lost or late only means depth 0 until it has recovered."""

    def __init__(
        self,
        sequence: GatewaySequence,
        route: Route,
        speculation: Speculation,
        events: Events,
        longest_wait_s: float,
    ) -> None:
        """
        Args:
            route: tells which drafter drafts.
            speculation: resolved.
            longest_wait_s: for any Draft, whatever the pace says.
        """
        self._sequence = sequence
        self._route = route
        self._speculation = speculation
        self._events = events
        self._longest_wait_s = longest_wait_s
        self._observer = PaceObserver(route, sequence)
        events.add(self._observer)
        self._pace: Pace
        self._is_paced = False  # the pace counts the sequence in
        self._is_started = False  # the drafter was given the prompt
        self._may_draft = speculation.mode != "off"  # not while a Draft is late or the drafter lost
        self._empty = 0  # Drafts without a token, in a row
        self._losses = 0  # of workers that had the sequence, without a Draft in between
        self._pause_s = 0.0  # before the next attempt to recover
        self.reason: str = DepthReason.OFF  # the depth is what it was when last asked for
        self._growth = Growth(sequence)
        self._taking_in: asyncio.Task[None] | None = None  # of the prompt
        self._begun: asyncio.Task[Proposal | None] | None = None
        self._newest = NO_PROPOSAL

    @contextmanager
    def at(self, pace: Pace) -> Iterator[None]:
        """While the sequence is verified by the target with that pace."""
        self._pace = self._observer.pace = pace
        self._is_paced = self._speculation.mode == "auto"
        if self._drafter is None:
            yield
            return
        with self._route.at(pace, self._is_paced):
            if not self._is_paced or pace.may_pay(self._paced):
                # Both workers take the prompt in at the same time: the first token never waits for the draft.
                self._start()
            yield

    @property
    def _drafter(self) -> SequenceDrafter | None:
        """The one that drafts; None: the request wants none."""
        return None if self._speculation.mode == "off" else self._route.current().drafter

    @property
    def _paced(self) -> PacedSequence:
        """The sequence as the pace sees it with that drafter."""
        return self._route.current().paced

    async def _follow(self) -> None:
        """Has another drafter draft from now on, if that is faster."""
        if await self._route.follow():
            self._empty = 0

    def depth(self) -> int:
        """Of the next Draft; 0 for plain decoding."""
        if not self._may_draft:
            return 0
        room, fixed = self._room, self._speculation.mode == "fixed"
        self.reason = DepthReason.FIXED if fixed else self._pace.reason(self._paced)
        depth = self._paced.max_depth if fixed else self._pace.depth(self._paced)
        if room == 0:
            self.reason = DepthReason.LAST_TOKEN
        return min(depth, room)

    @property
    def depth_in_force(self) -> int:
        """As ``depth``, without taking it: a trial stays to be made."""
        if not self._may_draft:
            return 0
        return self._paced.max_depth if self._speculation.mode == "fixed" else self._paced.depth

    @property
    def wanted_beside_target(self) -> tuple[int, int]:
        """Depth of the Draft that is to come with the next Verdict, and runners-up beside it, at most."""
        if not self._comes_with_verdicts:
            return self._route.verdict_depth, 0
        if self._speculation.mode == "fixed":
            return self._paced.max_depth, self._paced.leaves
        return self._pace.depth_in_rounds(self._paced), self._paced.leaves

    @property
    def target_may_continue(self) -> bool:
        """Whether the target may verify its own drafter's Drafts before they were seen here; no trial's."""
        comes_alone = self._comes_with_verdicts and self._paced.drafter.mixes is None
        return comes_alone and self.depth_in_force > 0

    def continued(self) -> Proposal | None:
        """The Draft with which the target goes on by itself; None where another drafter is to draft."""
        draft = self._sequence.draft
        is_wanted = self.target_may_continue and self._route.stays
        if draft is None or not is_wanted:
            return None
        self._sequence.draft = None
        base, step = len(self._sequence), self._sequence.draft_step
        self._newest = proposal = self._told(Proposal(draft, base, step=step), draft.chain_length)
        asyncio.get_running_loop().call_soon(self._pace.refresh)
        return proposal

    @property
    def _comes_with_verdicts(self) -> bool:
        """Whether the target sends the Drafts."""
        return self._drafter is not None and self._paced.drafter.comes_with_verdicts

    def _pays(self) -> bool:
        self._pace.refresh()
        return self._speculation.mode == "fixed" or self._pace.may_pay(self._paced)

    @property
    def _room(self) -> int:
        """Tokens that a Draft may have: the verdict adds one of the target's own."""
        return max(self._sequence.limit - len(self._sequence) - 1, 0)

    def grew(self) -> None:
        """The sequence has more tokens."""
        self._route.grew()
        self._growth.grew(self._pays)

    def begin(self, depth: int, traceparent: str) -> None:
        """Asks for a Draft that follows the committed tokens.

        traceparent: of the round that waits for it, or of the request where none does.
        """
        if self._newest.draft and self._newest.base == len(self._sequence):
            return  # it came with the Verdict
        self._start()
        self._begun = asyncio.create_task(self._after(self._begun, depth, traceparent))

    async def proposal(self) -> Proposal | None:
        """What ``begin`` asked for; None if it is late or the drafter lost: then ``resume`` is next."""
        assert self._begun is not None
        return await self._begun

    async def prepared(self) -> Proposal | None:
        """The newest Draft and what follows its likely verdicts, once that is prepared; None: never."""
        if self._begun is not None:
            await asyncio.wait({self._begun})
        newest = self._newest
        try:
            draft = await newest.following()
        except WorkerLostError as lost:
            self._lost(lost)
            return None
        return (
            None
            if draft is None
            else replace(
                NO_PROPOSAL,
                draft=draft,
                base=newest.base,
                ahead_hit=True,
                drafter=newest.drafter,
                asked=newest.asked,
                because=newest.because,
            )
        )

    def overtaken(self, proposal: Proposal) -> Proposal:
        """What is left of a Draft now that the target has gone on by itself, which tells how good it was."""
        text = self._sequence.since(proposal.base)
        guessed = proposal.draft.tokens[: min(proposal.draft.chain_length, len(text))]
        if guessed and self._sequence.is_coupled:
            self._events.emit(Overtaken(agreed(guessed, text), len(guessed)))
        return proposal.trimmed(self._sequence)

    async def resume(self, traceparent: str) -> Proposal:
        """Returns once rounds pay, with the Draft to begin them. Meanwhile the sequence is decoded freely.

        The drafter goes on guessing now and then, and the text itself tells how good the guesses are: it is
        what the target would have answered. That keeps its cache up to date too.

        traceparent: of the request: no round waits for the Drafts.
        """
        waits_for_this_task(traceparent)
        if self._drafter is None:
            await _never()
        if self._begun is not None:
            await asyncio.wait({self._begun})  # who awaits a task himself cancels it when he is cancelled
        while True:
            if self._empty:
                await self._growth.to(len(self._sequence) + self._pause())
            elif not self._may_draft:
                await self._recover()
            self._may_draft = True
            await self._growth.by(self._pace.probe_tokens(self._paced), self._pays)
            if self._is_paced and not self._pace.may_draft(self._paced):
                continue
            if not self._is_started:  # what was plain from the beginning took none of the draft's time
                await self._recover()
                self._is_started = True
            await self._follow()
            depth, room = self.depth(), self._room
            if room == 0:
                await _never()
            if self._paced.drafter.probes_by_rounds:
                # Its Draft comes with the verdict on an empty one; only a round can tell how good it is.
                self._paced.try_round()
                return self._resumed(NO_PROPOSAL)
            proposal = await self._propose(depth or min(TUNING.probe_depth, room))
            if proposal is None or not proposal.draft:
                continue
            if depth > 0:
                return self._resumed(proposal)
            await self._compare(proposal)

    def _resumed(self, proposal: Proposal) -> Proposal:
        self._events.emit(Resumed(self.reason))
        return proposal

    async def _recover(self) -> None:
        """Returns once the drafter has taken in what is committed, however long that takes.

        At once after one failure; after more in a row with pauses that grow, and with another drafter where
        there is one. Never where drafts were lost with the sequence again and again: it may be what ends
        them.
        """
        await self._stop_taking_in()
        while True:
            if self._losses >= MOST_LOSSES:
                logger.error("%d draft workers were lost with a sequence: it goes on without", self._losses)
                await _never()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(max(2 * self._pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            try:
                taken_in = -ROUTING_TUNING.small_lag
                while len(self._sequence) - taken_in > ROUTING_TUNING.small_lag:
                    taken_in = len(self._sequence)
                    await self._route.current().drafter.propose(0)
                return
            except WorkerLostError as lost:
                self._losses += isinstance(lost, SequenceLostError)
                if await self._route.replace_lost():
                    self._empty = 0

    def _pause(self) -> int:
        """Tokens of plain decoding before a drafter that had nothing to say is asked again."""
        if self._empty < MANY_EMPTY or self._paced.drafter.is_index:
            return 1
        return SHORTEST_PAUSE << min(self._empty - MANY_EMPTY, DOUBLINGS)

    async def _compare(self, proposal: Proposal) -> None:
        """A guess that is never verified, with the text once that has gone on long enough."""
        await self._growth.to(proposal.base + len(proposal.draft) + 1)
        if not self._sequence.is_coupled:  # only a round can tell
            self._paced.try_round()
            return
        guessed = proposal.draft.tokens
        self._events.emit(Compared(agreed(guessed, self._sequence.since(proposal.base)), len(guessed)))

    async def aclose(self) -> None:
        tasks = [task for task in (self._begun, self._taking_in) if task is not None]
        for task in tasks:
            task.cancel()
        if self._drafter is not None:
            await self._route.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        """Hands the prompt over, once; nobody waits for it."""
        if not self._is_started and self._drafter is not None:
            self._is_started = True
            self._taking_in = asyncio.create_task(self._take_in(self._drafter))

    async def _take_in(self, drafter: SequenceDrafter) -> None:
        try:
            await drafter.propose(0)
        except WorkerLostError as lost:
            self._lost(lost)

    async def _stop_taking_in(self) -> None:
        """A Draft is wanted, which needs the prompt too: nobody asks any more when that was there."""
        if self._taking_in is not None:
            self._taking_in.cancel()
            await asyncio.wait({self._taking_in})
            self._taking_in = None

    async def _after(
        self, before: "asyncio.Task[Proposal | None] | None", depth: int, traceparent: str
    ) -> Proposal | None:
        waits_for_this_task(traceparent)
        if before is not None:
            await asyncio.wait({before})
        await self._stop_taking_in()
        if not self._may_draft:
            return None
        await self._follow()
        return await self._propose(depth)

    async def _propose(self, depth: int) -> Proposal | None:
        assert self._drafter is not None
        loop = asyncio.get_running_loop()
        patience_s = min(self._paced.patience_s, self._longest_wait_s)
        self._newest, begun = NO_PROPOSAL, loop.time()
        loop.call_soon(self._pace.refresh)  # while the drafter works
        try:
            async with asyncio.timeout(patience_s):
                proposal = await self._drafter.propose(depth, self._paced.leaves)
        except TimeoutError:
            self._fall_back(FellBack(DepthReason.LATE, f"no Draft after {patience_s:.3f} s"))
            return None
        except WorkerLostError as lost:
            self._lost(lost)
            return None
        proposal = replace(proposal, seconds=loop.time() - begun)
        self._newest = proposal = self._told(proposal, depth)
        if self._empty < MANY_EMPTY:
            return proposal
        # Most often the context or the cache of a draft is full; a text without repeats is no fault.
        is_fault = self._empty == MANY_EMPTY and not self._paced.drafter.is_index
        self._fall_back(FellBack(DepthReason.EMPTY, f"{self._empty} in a row", is_fault))
        return None

    def _told(self, proposal: Proposal, depth: int) -> Proposal:
        """That so many tokens were asked for, with whose it is, once everybody knows."""
        name, because = self._route.current().name, self._route.reason
        drafter = proposal.drafter or name
        proposal = replace(proposal, drafter=drafter, asked=name, because=because, wanted=depth)
        self._pause_s, self._losses = 0.0, 0
        self._events.emit(Drafted(proposal))
        self._empty = 0 if proposal.draft else self._empty + 1
        return proposal

    def _lost(self, lost: WorkerLostError) -> None:
        if self._may_draft:
            self._losses += isinstance(lost, SequenceLostError)
            self._fall_back(FellBack(DepthReason.LOST, str(lost)))

    def _fall_back(self, event: FellBack) -> None:
        """To plain decoding, until the drafter has recovered."""
        self._may_draft, self.reason = False, event.reason
        if event.reason != DepthReason.EMPTY:
            self._empty = 0
        self._events.emit(event)


async def _never() -> NoReturn:
    await asyncio.Future[NoReturn]()
    raise AssertionError("nobody resolves it")
