"""Source of a sequence's Drafts: decides the depth of the next Draft, and requests it from the drafter."""

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
    """Decides how deep the next Draft is, and gets it. ``depth`` is a query: it changes nothing."""

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
            route: chooses the drafter.
            speculation: resolved settings of the request.
            longest_wait_s: longest wait for a Draft, seconds, even if the pace allows more.
        """
        self._sequence = sequence
        self._route = route
        self._policy = DepthPolicy(sequence, route, speculation, events)
        self._events = events
        self._longest_wait_s = longest_wait_s
        self._growth = Growth(sequence, events, self._policy.pays)
        self._health = DrafterHealth(sequence, route, events, self._growth, speculation.mode == "off")
        self._drafting: asyncio.Task[Proposal | None] | None = None  # newest request for a Draft
        self._newest = NO_PROPOSAL

    @contextmanager
    def at(self, pace: Pace) -> Iterator[None]:
        """Lets a target's pace decide while the target has the sequence."""
        with self._policy.at(pace):
            if self._policy.starts_with_drafts:
                # Target and drafter prefill the prompt at the same time: the first token never waits for the
                # drafter.
                self._health.start()
            yield

    def depth(self) -> tuple[int, str]:
        """Returns the depth of the next Draft, 0 for plain decoding, and its reason.

        The reason is a DepthReason, or a reason of the pace.
        """
        return self._policy.depth() if self._health.reason is None else (0, self._health.reason)

    def lease(self) -> Lease:
        """Returns the target's lease during rounds.

        It ends with the Verdict, unless the target makes all Drafts.
        """
        wanted = self._policy.wanted_with_verdict
        may_continue = wanted.depth > 0 and self._target_may_continue
        return longest_lease(self._sequence, wanted) if may_continue else wanted

    @property
    def _target_may_continue(self) -> bool:
        """Whether the target may verify its own Drafts before the gateway has received them."""
        return self._policy.target_may_continue and self._health.reason is None

    async def _follow(self) -> None:
        """Switches to another drafter if that is faster."""
        if await self._route.follow():
            self._health.changed()

    # Drafts for rounds.

    def begin(self, depth: int, traceparent: str) -> None:
        """Requests a Draft that follows the committed tokens, unless such a Draft came ahead of its request.

        traceparent: span of the round that waits for the Draft, or of the request if no round does.
        """
        if self._newest.draft and self._newest.base == len(self._sequence):
            return
        self._health.start()
        self._drafting = asyncio.create_task(self._after(self._drafting, depth, traceparent))

    async def proposal(self) -> Proposal | None:
        """Waits for the Draft that ``begin`` requested; None: there is none, and ``resume`` must follow."""
        assert self._drafting is not None
        return await self._drafting

    @property
    def may_prepare(self) -> bool:
        """Whether Drafts for the likely verdicts may follow the newest Draft."""
        is_drafting = self._drafting is not None and not self._drafting.done()
        return is_drafting or self._newest.following is not nothing_follows

    async def prepared(self) -> Proposal | None:
        """Waits for the newest Draft extended by the Drafts for its likely verdicts; None: none come."""
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
        """Returns the target's own Draft that it verifies already; None if another drafter should draft."""
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
        """Returns the part of a Draft that follows the committed tokens; the text judges the earlier part."""
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
        """Requests a Draft and returns it; None if it is late or lost, or the drafter has fallen silent.

        is_awaited: whether the target waits for the Draft. If not, only ``longest_wait_s`` limits the wait:
            plain decoding may keep the drafter's device busy.
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
        """Returns the proposal with its drafter and the requested depth, and emits Drafted."""
        current, because = self._route.current(), self._route.reason
        # A target drafter on trial may make the Draft in place of the current drafter.
        is_tried = proposal.asked not in ("", current.info.name)
        asked = self._route.candidate(proposal.asked).name if is_tried else current.name
        drafter = proposal.drafter or current.name
        proposal = replace(proposal, drafter=drafter, asked=asked, because=because, wanted=depth)
        self._events.emit(Drafted(proposal))
        self._health.drafted(proposal.draft)
        return proposal

    # Plain decoding.

    async def resume(self, traceparent: str) -> tuple[Proposal, str]:
        """Waits until rounds pay; returns the Draft to begin with and the reason of its depth.

        Meanwhile the sequence is in plain decoding. Now and then the drafter makes a guess, which also keeps
        its KV cache up to date. The text judges the guess: it is what the target would have answered.

        traceparent: span of the request, since no round waits for the Drafts.
        """
        TRACEPARENT.set(traceparent)
        if self._health.is_off:
            await wait_forever()
        if self._drafting is not None:
            await asyncio.wait({self._drafting})  # a plain await would pass a cancellation on to the task
        while True:
            await self._health.recovered()
            await self._growth.wait_for_tokens(self._policy.pace.probe_tokens(self._policy.paced))
            if (room := self._policy.room) == 0:
                await wait_forever()
            if not self._policy.may_draft:
                continue
            if self._health.is_cold:  # until now the sequence has cost the drafter no time
                await self._health.catch_up()
            await self._follow()
            depth, reason = self.depth()
            if self._policy.info.probes_by_rounds:
                # The Draft of such a drafter comes with the Verdict on an empty Draft; only a round can judge
                # it.
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
        """Cancels the pending requests, and frees what the drafters hold for the sequence."""
        tasks = [task for task in (self._drafting, self._health.taking_in) if task is not None]
        for task in tasks:
            task.cancel()
        if not self._health.is_off:
            await self._route.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)
