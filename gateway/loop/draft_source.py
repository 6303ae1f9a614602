"""Drafts of one sequence: how deep the next Draft is, and asking the drafter for it."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from gateway.drafters.target import from_verdict
from gateway.drafters.trace_context import TRACEPARENT
from gateway.errors import WorkerLostError
from gateway.events import Compared, Drafted, Events, Overtaken, Resumed
from gateway.loop.depth_policy import DepthPolicy
from gateway.loop.drafter_health import DrafterHealth
from gateway.loop.growth import Growth, wait_forever
from gateway.loop.lease import longest_lease
from gateway.proposal import NO_PROPOSAL, Proposal, nothing_follows
from gateway.routing.route import Route
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.lease import Lease
from outrider.learning.agreement import agreement
from outrider.pace.controller import Pace
from outrider.pace.tuning import TUNING


class DraftSource:
    """Answers how deep the next Draft is, and gets it. ``depth`` is a query: nothing changes by asking."""

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
            route: knows which drafter drafts.
            speculation: resolved.
            longest_wait_s: limit of the wait for a Draft, even if the pace allows more.
        """
        self._sequence = sequence
        self._route = route
        self._policy = DepthPolicy(sequence, route, speculation, events)
        self._events = events
        self._longest_wait_s = longest_wait_s
        self._growth = Growth(sequence, events, self._policy.pays)
        self._health = DrafterHealth(sequence, route, events, self._growth, speculation.mode == "off")
        self._drafting: asyncio.Task[Proposal | None] | None = None  # the newest Draft that was asked for
        self._newest = NO_PROPOSAL

    @contextmanager
    def at(self, pace: Pace) -> Iterator[None]:
        """Lets a pace decide while its target has the sequence."""
        with self._policy.at(pace):
            if self._policy.starts_with_drafts:
                # Both workers take the prompt in at the same time: the first token never waits for the draft.
                self._health.start()
            yield

    def depth(self) -> tuple[int, str]:
        """Tokens of the next Draft, 0 for plain decoding; and the DepthReason, or the pace's own."""
        return self._policy.depth() if self._health.reason is None else (0, self._health.reason)

    def lease(self) -> Lease:
        """Returns the lease of a target in rounds: it ends with the Verdict, unless it makes all Drafts."""
        wanted = self._policy.wanted_with_verdict
        may_continue = wanted.depth > 0 and self._target_may_continue
        return longest_lease(self._sequence, wanted) if may_continue else wanted

    @property
    def _target_may_continue(self) -> bool:
        """Whether the target may verify its own Drafts before they were seen here."""
        return self._policy.target_may_continue and self._health.reason is None

    async def _follow(self) -> None:
        """Changes to another drafter, if that is faster."""
        if await self._route.follow():
            self._health.changed()

    # Drafts for rounds.

    def begin(self, depth: int, traceparent: str) -> None:
        """Asks for a Draft that follows the committed tokens, unless it came with the Verdict.

        traceparent: span of the round that waits for the Draft, or of the request if no round does.
        """
        if self._newest.draft and self._newest.base == len(self._sequence):
            return
        self._health.start()
        self._drafting = asyncio.create_task(self._after(self._drafting, depth, traceparent))

    async def proposal(self) -> Proposal | None:
        """Returns the Draft that ``begin`` asked for; None: there is none, and ``resume`` is next."""
        assert self._drafting is not None
        return await self._drafting

    @property
    def may_prepare(self) -> bool:
        """Whether the newest Draft may come with what follows its likely verdicts."""
        is_drafting = self._drafting is not None and not self._drafting.done()
        return is_drafting or self._newest.following is not nothing_follows

    async def prepared(self) -> Proposal | None:
        """Returns the newest Draft with what follows its likely verdicts, once prepared; None: never."""
        if self._drafting is not None:
            await asyncio.wait({self._drafting})
        newest = self._newest
        try:
            draft = await newest.following()
        except WorkerLostError as lost:
            self._health.lost(lost)
            return None
        if draft is None:
            return None
        return Proposal(
            draft,
            newest.base,
            ahead_hit=True,
            drafter=newest.drafter,
            asked=newest.asked,
            because=newest.because,
        )

    def continued(self) -> Proposal | None:
        """Returns the Draft with which the target continues alone; None if another drafter should draft."""
        came = self._sequence.draft
        is_wanted = self._target_may_continue and self._route.stays
        if came is None or not is_wanted:
            return None
        self._sequence.draft = None
        depth = min(came.draft.chain_length, self._policy.asked_depth)
        self._newest = proposal = self._received(from_verdict(came, self._sequence, depth), depth)
        asyncio.get_running_loop().call_soon(self._policy.pace.refresh)
        return proposal

    def overtaken(self, proposal: Proposal) -> Proposal:
        """Returns the part of a Draft that follows the committed tokens; the text judges the part before."""
        text = self._sequence.since(proposal.base)
        guessed = proposal.draft.tokens[: min(proposal.draft.chain_length, len(text))]
        if guessed and self._sequence.is_coupled:
            found = agreement(guessed, text)
            self._events.emit(Overtaken(found.correct, found.reached))
        return proposal.trimmed(self._sequence)

    async def _after(
        self, before: "asyncio.Task[Proposal | None] | None", depth: int, traceparent: str
    ) -> Proposal | None:
        TRACEPARENT.set(traceparent)
        if before is not None:
            await asyncio.wait({before})
        await self._health.stop_taking_in()
        if self._health.reason is not None:
            return None
        await self._follow()
        return await self._propose(depth, is_awaited=True)

    async def _propose(self, depth: int, *, is_awaited: bool) -> Proposal | None:
        """Returns the Draft, or None.

        is_awaited: whether the target waits for the Draft. If it does not, plain decoding may be what keeps
            the drafter's device busy: such a Draft may take its time.
        """
        loop = asyncio.get_running_loop()
        drafter, decision = self._route.current().drafter, self._policy.paced.decision
        patience_s = min(decision.patience_s if is_awaited else math.inf, self._longest_wait_s)
        self._newest, started = NO_PROPOSAL, loop.time()
        loop.call_soon(self._policy.pace.refresh)  # while the drafter works
        try:
            async with asyncio.timeout(patience_s):
                proposal = await drafter.propose(depth, decision.alternatives)
        except TimeoutError:
            self._health.late(patience_s, is_awaited=is_awaited)
            return None
        except WorkerLostError as lost:
            self._health.lost(lost)
            return None
        proposal = replace(proposal, seconds=loop.time() - started)
        self._newest = proposal = self._received(proposal, depth)
        return None if self._health.fall_silent() else proposal

    def _received(self, proposal: Proposal, depth: int) -> Proposal:
        """Returns the proposal with its drafter and the depth that was asked for, and emits Drafted."""
        current, because = self._route.current(), self._route.reason
        # A target drafter that is tried makes a Draft in the place of the current drafter.
        is_tried = proposal.asked not in ("", current.info.name)
        asked = self._route.candidate(proposal.asked).name if is_tried else current.name
        drafter = proposal.drafter or current.name
        proposal = replace(proposal, drafter=drafter, asked=asked, because=because, wanted=depth)
        self._events.emit(Drafted(proposal))
        self._health.drafted(proposal.draft)
        return proposal

    # Plain decoding.

    async def resume(self, traceparent: str) -> tuple[Proposal, str]:
        """Returns once rounds pay, with the Draft to begin them and what decided its depth.

        Meanwhile the sequence is in plain decoding.

        The drafter guesses now and then, which also keeps its cache up to date. The text judges the guesses:
        it is what the target would have answered.

        traceparent: span of the request: no round waits for the Drafts.
        """
        TRACEPARENT.set(traceparent)
        if self._health.is_off:
            await wait_forever()
        if self._drafting is not None:
            await asyncio.wait({self._drafting})  # a plain await would cancel the task with the present task
        while True:
            await self._health.recovered()
            await self._growth.wait_for_tokens(self._policy.pace.probe_tokens(self._policy.paced))
            if (room := self._policy.room) == 0:
                await wait_forever()
            if not self._policy.may_draft:
                continue
            if self._health.is_cold:  # plain until now: it took no time of the draft
                await self._health.catch_up()
            await self._follow()
            depth, reason = self.depth()
            if self._policy.info.probes_by_rounds:
                # Its Draft comes with the Verdict on an empty Draft, and only a round can judge it.
                self._policy.paced.try_round()
                return self._resumed(NO_PROPOSAL, reason)
            proposal = await self._propose(depth or min(TUNING.probe_depth, room), is_awaited=False)
            if proposal is None or not proposal.draft:
                continue
            if depth > 0:
                return self._resumed(proposal, reason)
            await self._compare(proposal)

    def _resumed(self, proposal: Proposal, reason: str) -> tuple[Proposal, str]:
        self._events.emit(Resumed(reason))
        return proposal, reason

    async def _compare(self, proposal: Proposal) -> None:
        """Compares an unverified guess with the text, once the text is long enough."""
        await self._growth.wait_for_length(proposal.base + len(proposal.draft) + 1)
        if not self._sequence.is_coupled:  # only a round can judge the guess
            self._policy.paced.try_round()
            return
        found = agreement(proposal.draft.tokens, self._sequence.since(proposal.base))
        self._events.emit(Compared(found.correct, found.reached))

    async def aclose(self) -> None:
        """Ends what is under way and frees what the drafters hold."""
        tasks = [task for task in (self._drafting, self._health.taking_in) if task is not None]
        for task in tasks:
            task.cancel()
        if not self._health.is_off:
            await self._route.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)
