"""Where the Drafts of one sequence come from: is its drafter well, how deep is its next Draft, asking it.

``draft_states`` has the states. A drafter that is late, silent or lost only means plain decoding until it has
recovered: nothing here fails a request.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from gateway.drafters.drafter import SequenceDrafter
from gateway.drafters.waiting import waits_for_this_task
from gateway.errors import SequenceLostError, WorkerLostError
from gateway.events import (
    Compared,
    Drafted,
    Event,
    Events,
    FellBack,
    Overtaken,
    Resumed,
    TokenDecoded,
    VerdictFell,
)
from gateway.loop.depth_policy import DepthPolicy
from gateway.loop.draft_states import (
    DraftsCold,
    DraftsLate,
    DraftsLost,
    DraftsOff,
    DraftsReady,
    DraftsSilent,
    DraftState,
)
from gateway.loop.lease import longest_lease
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.route import Route
from gateway.routing.tuning import TUNING as ROUTING
from gateway.sequence import GatewaySequence
from gateway.settings import Speculation
from outrider.decoding.lease import Lease
from outrider.learning.agreement import agreement
from outrider.learning.backoff import Backoff
from outrider.pace.controller import Pace
from outrider.pace.tuning import TUNING

logger = logging.getLogger(f"ray.serve.{__name__}")

MANY_EMPTY = 4  # Drafts without a token, in a row, that end rounds
SILENCE = Backoff(16, 1024)  # tokens of plain decoding before a silent drafter is asked again
MOST_LOSSES = 3  # draft workers lost with one sequence without a Draft in between: it may be the reason
RECOVERY = Backoff(0.25, 30.0)  # seconds before a second attempt in a row to recover, and later ones


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
            route: says which drafter drafts.
            speculation: resolved.
            longest_wait_s: limit of the wait for any Draft, whatever the pace says.
        """
        self._sequence = sequence
        self._route = route
        self._policy = DepthPolicy(sequence, route, speculation, events)
        self._events = events
        events.add(self)
        self._longest_wait_s = longest_wait_s
        self._state: DraftState = DraftsOff() if speculation.mode == "off" else DraftsCold()
        self._attempts = 0  # to recover, since the newest Draft
        self._grew = asyncio.Event()
        self._awaited = 0  # length of the sequence that a task waits for
        self._taking_in: asyncio.Task[None] | None = None  # the drafter takes in the prompt
        self._begun: asyncio.Task[Proposal | None] | None = None  # the newest Draft that was asked for
        self._newest = NO_PROPOSAL

    @contextmanager
    def at(self, pace: Pace) -> Iterator[None]:
        """Lets that pace decide, while the target that it belongs to has the sequence."""
        with self._policy.at(pace):
            if self._policy.starts_with_drafts:
                # Both workers take the prompt in at the same time: the first token never waits for the draft.
                self._start()
            yield

    def depth(self) -> tuple[int, str]:
        """Tokens of the next Draft, 0 for plain decoding; and the DepthReason, or the pace's own."""
        return self._policy.depth() if self._state.reason is None else (0, self._state.reason)

    def lease(self) -> Lease:
        """Returns the lease of a target in rounds: it ends with the Verdict, unless it makes all Drafts."""
        depth, alternatives = self._policy.wanted_with_verdict
        if not depth or not self._target_may_continue:
            return Lease(depth=depth, alternatives=alternatives)
        return longest_lease(self._sequence, depth, alternatives)

    @property
    def _target_may_continue(self) -> bool:
        """Whether the target may verify its own Drafts before they were seen here."""
        return self._policy.target_may_continue and self._state.reason is None

    async def _follow(self) -> None:
        """Changes to another drafter, if that is faster."""
        if await self._route.follow() and isinstance(self._state, DraftsReady):
            self._become(replace(self._state, empty=0))

    # Drafts for rounds.

    def begin(self, depth: int, traceparent: str) -> None:
        """Asks for a Draft that follows the committed tokens, unless it came with the Verdict.

        traceparent: of the round that waits for the Draft; of the request if none does.
        """
        if self._newest.draft and self._newest.base == len(self._sequence):
            return
        self._start()
        self._begun = asyncio.create_task(self._after(self._begun, depth, traceparent))

    async def proposal(self) -> Proposal | None:
        """Returns what ``begin`` asked for; None if there is none: then ``resume`` is next."""
        assert self._begun is not None
        return await self._begun

    async def prepared(self) -> Proposal | None:
        """Returns the newest Draft with what follows its likely verdicts, once prepared; None: never."""
        if self._begun is not None:
            await asyncio.wait({self._begun})
        newest = self._newest
        try:
            draft = await newest.following()
        except WorkerLostError as lost:
            self._lost(lost)
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
        """Returns the Draft with which the target goes on alone; None if another drafter is to draft."""
        draft = self._sequence.draft
        is_wanted = self._target_may_continue and self._route.stays
        if draft is None or not is_wanted:
            return None
        self._sequence.draft = None
        base, step = len(self._sequence), self._sequence.draft_step
        self._newest = proposal = self._received(Proposal(draft, base, step=step), draft.chain_length)
        asyncio.get_running_loop().call_soon(self._policy.pace.refresh)
        return proposal

    def overtaken(self, proposal: Proposal) -> Proposal:
        """Returns what is left of a Draft after the target has gone on alone; the text judges the rest."""
        text = self._sequence.since(proposal.base)
        guessed = proposal.draft.tokens[: min(proposal.draft.chain_length, len(text))]
        if guessed and self._sequence.is_coupled:
            found = agreement(guessed, text)
            self._events.emit(Overtaken(found.correct, found.reached))
        return proposal.trimmed(self._sequence)

    async def _after(
        self, before: "asyncio.Task[Proposal | None] | None", depth: int, traceparent: str
    ) -> Proposal | None:
        waits_for_this_task(traceparent)
        if before is not None:
            await asyncio.wait({before})
        await self._stop_taking_in()
        if self._state.reason is not None:
            return None
        await self._follow()
        return await self._propose(depth)

    async def _propose(self, depth: int) -> Proposal | None:
        loop = asyncio.get_running_loop()
        patience_s = min(self._policy.paced.patience_s, self._longest_wait_s)
        self._newest, begun = NO_PROPOSAL, loop.time()
        loop.call_soon(self._policy.pace.refresh)  # while the drafter works
        try:
            async with asyncio.timeout(patience_s):
                proposal = await self._route.current().drafter.propose(depth, self._policy.paced.alternatives)
        except TimeoutError:
            late = DraftsLate(retry_at=self._retry_at(), losses=self._state.losses)
            self._fall_back(late, f"no Draft after {patience_s:.3f} s")
            return None
        except WorkerLostError as lost:
            self._lost(lost)
            return None
        proposal = replace(proposal, seconds=loop.time() - begun)
        self._newest = proposal = self._received(proposal, depth)
        empty = self._state.empty if isinstance(self._state, DraftsReady) else 0
        if empty < MANY_EMPTY:
            return proposal
        # Most often the context or the cache of a draft is full; a text without repeats is no fault.
        is_fault = empty == MANY_EMPTY and not self._policy.info.is_index
        pause = 1 if self._policy.info.is_index else int(SILENCE.after(empty - MANY_EMPTY))
        silent = DraftsSilent(until_length=len(self._sequence) + pause, empty=empty)
        self._fall_back(silent, f"{empty} in a row", is_fault=is_fault)
        return None

    def _received(self, proposal: Proposal, depth: int) -> Proposal:
        """Returns the proposal with its drafter and the depth that was asked for, and emits Drafted."""
        name, because = self._route.current().name, self._route.reason
        drafter = proposal.drafter or name
        proposal = replace(proposal, drafter=drafter, asked=name, because=because, wanted=depth)
        self._attempts = 0
        self._events.emit(Drafted(proposal))
        empty = self._state.empty if isinstance(self._state, DraftsReady) else 0
        self._become(DraftsReady(empty=0 if proposal.draft else empty + 1))
        return proposal

    # Plain decoding.

    def on(self, event: Event) -> None:
        """Wakes what waits for the sequence to have more tokens, or for rounds to pay."""
        if isinstance(event, VerdictFell | TokenDecoded) and (
            len(self._sequence) >= self._awaited or self._policy.pays()
        ):
            self._grew.set()

    async def resume(self, traceparent: str) -> tuple[Proposal, str]:
        """Returns once rounds pay, with the Draft to begin them and what decided its depth.

        Meanwhile the sequence is in plain decoding.

        The drafter goes on guessing now and then, which keeps its cache up to date too. The text judges the
        guesses: it is what the target would have answered.

        traceparent: of the request: no round waits for the Drafts.
        """
        waits_for_this_task(traceparent)
        if isinstance(self._state, DraftsOff):
            await _never()
        if self._begun is not None:
            await asyncio.wait({self._begun})  # awaited itself, the task would be cancelled with this one
        while True:
            await self._recovered()
            await self._grow(self._policy.pace.probe_tokens(self._policy.paced))
            if (room := self._policy.room) == 0:
                await _never()
            if not self._policy.may_draft:
                continue
            if isinstance(self._state, DraftsCold):  # plain until now: it took no time of the draft
                await self._catch_up()
            await self._follow()
            depth, reason = self.depth()
            if self._policy.info.probes_by_rounds:
                # Its Draft comes with the Verdict on an empty one; only a round can tell how good it is.
                self._policy.paced.try_round()
                return self._resumed(NO_PROPOSAL, reason)
            proposal = await self._propose(depth or min(TUNING.probe_depth, room))
            if proposal is None or not proposal.draft:
                continue
            if depth > 0:
                return self._resumed(proposal, reason)
            await self._compare(proposal)

    def _resumed(self, proposal: Proposal, reason: str) -> tuple[Proposal, str]:
        self._events.emit(Resumed(reason))
        return proposal, reason

    async def _recovered(self) -> None:
        """Returns once the drafter may be asked again."""
        match self._state:
            case DraftsSilent(until_length=length, empty=empty):
                await self._reach(length)
                self._become(DraftsReady(empty=empty))
            case DraftsReady(empty=empty) if empty:
                await self._reach(len(self._sequence) + 1)
            case DraftsLate() | DraftsLost():
                await self._catch_up()

    async def _catch_up(self) -> None:
        """Returns once the drafter has taken in what is committed, however long that takes.

        After a failure it asks at once, after more in a row with pauses that grow, and it asks another
        drafter if there is one. After MOST_LOSSES it never returns: the sequence may be what ends workers.
        """
        await self._stop_taking_in()
        while True:
            match self._state:
                case DraftsLost(losses=losses) if losses >= MOST_LOSSES:
                    logger.error("%d draft workers were lost with a sequence: it goes on without", losses)
                    await _never()
                case DraftsLate(retry_at=retry_at) | DraftsLost(retry_at=retry_at):
                    await asyncio.sleep(retry_at - asyncio.get_running_loop().time())
            try:
                taken_in = -ROUTING.small_lag
                while len(self._sequence) - taken_in > ROUTING.small_lag:
                    taken_in = len(self._sequence)
                    await self._route.current().drafter.propose(0)
            except WorkerLostError as lost:
                self._become(self._after_loss(lost))
                await self._route.replace_lost()
            else:
                self._become(DraftsReady(losses=self._state.losses))
                return

    async def _compare(self, proposal: Proposal) -> None:
        """Compares a guess that is never verified with the text, once that has gone on long enough."""
        await self._reach(proposal.base + len(proposal.draft) + 1)
        if not self._sequence.is_coupled:  # only a round can tell
            self._policy.paced.try_round()
            return
        found = agreement(proposal.draft.tokens, self._sequence.since(proposal.base))
        self._events.emit(Compared(found.correct, found.reached))

    async def _reach(self, length: int) -> None:
        """Returns once the sequence has that many tokens."""
        while len(self._sequence) < length:
            await self._next(length)

    async def _grow(self, count: int) -> None:
        """Returns once the sequence has that many tokens more, or rounds pay."""
        end = min(len(self._sequence) + count, self._sequence.limit)
        while len(self._sequence) < end and not self._policy.pays():
            await self._next(end)

    async def _next(self, length: int) -> None:
        self._awaited = length
        self._grew.clear()
        await self._grew.wait()

    # The drafter's health.

    def _start(self) -> None:
        """Hands the prompt over, once; nothing waits for it."""
        if isinstance(self._state, DraftsCold):
            self._become(DraftsReady())
            self._taking_in = asyncio.create_task(self._take_in(self._route.current().drafter))

    async def _take_in(self, drafter: SequenceDrafter) -> None:
        try:
            await drafter.propose(0)
        except WorkerLostError as lost:
            self._lost(lost)

    async def _stop_taking_in(self) -> None:
        """Stops waiting for the prompt alone: a Draft is wanted, which needs the prompt too."""
        if self._taking_in is not None:
            self._taking_in.cancel()
            await asyncio.wait({self._taking_in})
            self._taking_in = None

    def _lost(self, lost: WorkerLostError) -> None:
        if self._state.reason is None:
            self._fall_back(self._after_loss(lost), str(lost))

    def _after_loss(self, lost: WorkerLostError) -> DraftsLost:
        losses = self._state.losses + isinstance(lost, SequenceLostError)
        return DraftsLost(retry_at=self._retry_at(), losses=losses)

    def _retry_at(self) -> float:
        """When to try to recover, in the event loop's time; each time in a row later."""
        pause_s = RECOVERY.after(self._attempts - 1) if self._attempts else 0.0
        self._attempts += 1
        return asyncio.get_running_loop().time() + pause_s

    def _fall_back(
        self, state: DraftsLate | DraftsSilent | DraftsLost, detail: str, is_fault: bool = True
    ) -> None:
        """Ends rounds, until the drafter has recovered."""
        self._become(state)
        self._events.emit(FellBack(state.reason, detail, is_fault))

    def _become(self, state: DraftState) -> None:
        if type(state) is not type(self._state):
            logger.debug("sequence %d: its drafter is %s", self._sequence.number, type(state).__name__)
        self._state = state

    async def aclose(self) -> None:
        """Ends what is under way and frees what the drafters hold."""
        tasks = [task for task in (self._begun, self._taking_in) if task is not None]
        for task in tasks:
            task.cancel()
        if not isinstance(self._state, DraftsOff):
            await self._route.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _never() -> NoReturn:
    await asyncio.Future[NoReturn]()
    raise AssertionError("nobody resolves it")
