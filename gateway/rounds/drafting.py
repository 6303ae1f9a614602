"""The Drafts of one sequence: how deep, how long to wait for one, when to begin again."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from gateway.drafters.drafters import Drafter
from gateway.errors import WorkerLostError
from gateway.observe.answer_trace import NoTrace
from gateway.observe.stats import Stats
from gateway.rounds.proposal import Proposal, refused
from gateway.rounds.sequence import Sequence
from gateway.settings import Speculation
from outrider.decoding.draft import agreed
from outrider.pace.controller import PROBE_DEPTH, Pace, PacedSequence
from protos import rounds_pb2
from protos.conversions import chain_depth, step_from_message

# Why a Draft is as deep as it is, or there is none, beside what the pace says.
OFF, FIXED, LATE, LOST, LAST_TOKEN = "off", "fixed", "late Draft", "lost draft worker", "last token"
EMPTY = "empty Drafts"

MANY_EMPTY = 4  # Drafts without a token, in a row, that end rounds
SHORTEST_PAUSE, DOUBLINGS = 16, 6  # tokens of plain decoding before another is asked for, doubled each time


class Drafting:
    """A drafter that is lost or late only means depth 0 until it has recovered."""

    def __init__(
        self,
        sequence: Sequence,
        drafter: Drafter | None,
        speculation: Speculation,
        paced: PacedSequence,
        stats: Stats,
        longest_wait_s: float,
        forward: Callable[[Proposal], Awaitable[None]],
        trace: NoTrace,
    ) -> None:
        """
        Args:
            speculation: resolved.
            paced: the sequence as the pace sees it.
            longest_wait_s: for any Draft, whatever the pace says.
            forward: takes the Drafts that were prepared for the likely verdicts, in one tree.
        """
        self._sequence = sequence
        self._drafter = drafter
        self._speculation = speculation
        self._paced = paced
        self._stats = stats
        self._longest_wait_s = longest_wait_s
        self._pace: Pace
        self._is_started = False  # the drafter was given the prompt
        self._may_draft = drafter is not None  # not while a Draft is late or the drafter lost
        self._empty = 0  # Drafts without a token, in a row
        self.reason = OFF  # the depth is what it was when last asked for
        self._forward = forward
        self._trace = trace
        self._grew = asyncio.Event()
        self._stretch = 0  # round of the newest token of plain decoding
        self._begun: asyncio.Task[Proposal | None] | None = None
        self._listening: asyncio.Task[None] | None = None  # for what is prepared after the newest Draft

    @contextmanager
    def at(self, pace: Pace) -> Iterator[None]:
        """While the sequence is verified by the target with that pace."""
        self._pace = pace
        is_paced = self._speculation.mode == "auto"
        if is_paced:
            pace.join(self._paced)
        if not is_paced or pace.may_pay(self._paced):
            # Both workers take the prompt in at the same time: the first token never waits for the draft.
            self._start()
        try:
            yield
        finally:
            if is_paced:
                pace.leave(self._paced)

    def depth(self) -> int:
        """Of the next Draft; 0 for plain decoding."""
        if not self._may_draft:
            return 0
        room, fixed = self._room, self._speculation.mode == "fixed"
        self.reason = FIXED if fixed else self._pace.reason(self._paced)
        depth = self._paced.max_depth if fixed else self._pace.depth(self._paced)
        if room == 0:
            self.reason = LAST_TOKEN
        return min(depth, room)

    @property
    def depth_in_force(self) -> int:
        """As ``depth``, without taking it: a trial stays to be made."""
        if not self._may_draft:
            return 0
        return self._paced.max_depth if self._speculation.mode == "fixed" else self._paced.depth

    def _pays(self) -> bool:
        self._pace.refresh()
        return self._speculation.mode == "fixed" or self._pace.may_pay(self._paced)

    @property
    def _room(self) -> int:
        """Tokens that a Draft may have: the verdict adds one of the target's own."""
        return max(self._sequence.limit - len(self._sequence) - 1, 0)

    def begin(self, depth: int, traceparent: str) -> None:
        """Asks for a Draft that follows the committed tokens.

        traceparent: of the round that waits for it, or of the request where none does.
        """
        self._start()
        self._begun = asyncio.create_task(self._after(self._begun, depth, traceparent))

    async def proposal(self) -> Proposal | None:
        """What ``begin`` asked for; None if it is late or the drafter lost: then ``resume`` is next."""
        assert self._begun is not None
        return await self._begun

    async def resume(self) -> Proposal:
        """Returns once rounds pay, with the Draft to begin them. Meanwhile the sequence is decoded freely.

        The drafter goes on guessing now and then, and the text itself tells how good the guesses are: it is
        what the target would have answered. That keeps its cache up to date too.
        """
        if self._drafter is None:
            await _never()
        if self._begun is not None:
            await self._begun
        while True:
            if self._empty:
                await self._longer(len(self._sequence) + self._pause(self._drafter))
            elif not self._may_draft:
                await self._drafter.recover()
            self._may_draft = True
            await self._grown(self._pace.probe_tokens(self._paced))
            if not self._is_started:  # what was plain from the beginning took none of the draft's time
                await self._drafter.recover()
                self._is_started = True
            depth, room = self.depth(), self._room
            if room == 0:
                await _never()
            proposal = await self._propose(depth or min(PROBE_DEPTH, room), self._trace.request)
            if proposal is None or not proposal.draft.tokens:
                continue
            if depth > 0:
                self._trace.event("rounds", self.reason)
                return proposal
            await self._compare(proposal)

    def _pause(self, drafter: Drafter) -> int:
        """Tokens of plain decoding before a drafter that had nothing to say is asked again."""
        if self._empty < MANY_EMPTY or not drafter.asks_a_worker:
            return 1
        return SHORTEST_PAUSE << min(self._empty - MANY_EMPTY, DOUBLINGS)

    async def _grown(self, count: int) -> None:
        """Until there are so many tokens more, or rounds pay."""
        end = min(len(self._sequence) + count, self._sequence.limit)
        while len(self._sequence) < end and not self._pays():
            self._grew.clear()
            await self._grew.wait()

    async def _longer(self, length: int) -> None:
        """Until there are at least so many tokens."""
        while len(self._sequence) < length:
            self._grew.clear()
            await self._grew.wait()

    async def _compare(self, proposal: Proposal) -> None:
        """Has the pace learn from a guess that is never verified, once the text has gone on long enough."""
        await self._longer(proposal.base + len(proposal.draft.tokens) + 1)
        if self._speculation.verification != "coupled":
            # A ratio rule accepts other tokens than those that were said: only a round can tell.
            self._paced.trial_turns = 1
            return
        guessed = proposal.draft.tokens
        right = agreed(guessed, self._sequence.since(proposal.base))
        self._pace.observe_probe(self._paced, right, min(right + 1, len(guessed)))

    def answered(self, proposal: Proposal, reply: rounds_pb2.TargetReply, overhead_s: float = 0.0) -> None:
        """Has the pace learn from a Verdict, whose tokens are committed.

        overhead_s: from Verify to Verdict, outside of the target worker; 0 where it went on by itself.
        """
        self._grew.set()
        self._paced.length = len(self._sequence)
        drafted = bool(proposal.draft.tokens)
        if reply.timings.HasField("last_step"):
            self._pace.observe_target(step_from_message(reply.timings.last_step), reply.load.decoding)
        if drafted:
            depth = chain_depth(proposal.draft)
            accepted = sum(node < depth for node in reply.accepted)
            verified = accepted + (len(reply.accepted) > accepted or refused(proposal.draft, reply))
            self._pace.observe_round(
                self._paced,
                accepted,
                verified,
                depth,
                proposal.seconds + overhead_s,
                proposal.overhead_s + overhead_s,
                reply.timings.total_ns / 1e9,
                proposal.ahead_hit,
            )
        elif reply.round == self._stretch:  # the first token of a stretch waited for more than a step
            self._pace.observe_plain(self._paced, reply.timings.total_ns / 1e9)
        else:
            self._stretch = reply.round

    async def aclose(self) -> None:
        tasks = [task for task in (self._begun, self._listening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._drafter is not None:
            await self._drafter.aclose()

    def _start(self) -> None:
        """Hands the prompt over, once; nobody waits for it."""
        if not self._is_started and self._drafter is not None:
            self._is_started = True
            self._begun = asyncio.create_task(self._started(self._drafter))

    async def _started(self, drafter: Drafter) -> None:
        try:
            await drafter.start()
        except WorkerLostError as lost:
            self._lost(lost)

    async def _after(
        self, before: "asyncio.Task[Proposal | None] | None", depth: int, traceparent: str
    ) -> Proposal | None:
        if before is not None:
            await before
        if not self._may_draft:
            return None
        return await self._propose(depth, traceparent)

    async def _propose(self, depth: int, traceparent: str) -> Proposal | None:
        assert self._drafter is not None
        if self._listening is not None:
            self._listening.cancel()
        loop = asyncio.get_running_loop()
        patience_s = min(self._paced.patience_s, self._longest_wait_s)
        begun, base = loop.time(), len(self._sequence)
        loop.call_soon(self._pace.refresh)  # while the drafter works
        try:
            reply = await self._drafter.propose(depth, patience_s, self._paced.leaves, traceparent)
        except WorkerLostError as lost:
            self._lost(lost)
            return None
        if reply is None:
            self._stats.late_drafts += 1
            self._fall_back(LATE, f"no Draft after {patience_s:.3f} s")
            return None
        if reply.timings.last_step.number:
            self._pace.observe_drafting(self._paced.drafter, step_from_message(reply.timings.last_step))
        if reply.HasField("ahead"):
            self._count(reply.ahead)
        self._empty = 0 if reply.draft.tokens else self._empty + 1
        if self._empty >= MANY_EMPTY:
            self._give_up()
            return None
        if reply.draft.tokens:
            self._listening = asyncio.create_task(self._listen(base))
        ahead_hit = reply.ahead.tokens > 0 if reply.HasField("ahead") else None
        seconds = loop.time() - begun
        overhead_s = seconds - reply.timings.total_ns / 1e9
        step_s = reply.timings.step_ns / 1e9
        rank = reply.ahead.rank if reply.ahead.HasField("rank") else None
        return Proposal(reply.draft, base, seconds, overhead_s, ahead_hit, step_s, rank)

    async def _listen(self, base: int) -> None:
        assert self._drafter is not None
        try:
            draft = await self._drafter.ahead()
        except WorkerLostError as lost:
            self._lost(lost)
            return
        if draft is not None:
            await self._forward(Proposal(draft, base, ahead_hit=True))

    def _count(self, outcome: rounds_pb2.AheadOutcome) -> None:
        self._stats.prepared_for += 1
        if outcome.HasField("rank"):
            self._pace.observe_rank(self._paced, outcome.rank)
        if outcome.tokens:
            self._stats.ahead_hits[outcome.rank] += 1
        self._stats.saved_s += outcome.saved_ns / 1e9
        self._stats.wasted += outcome.wasted_tokens

    def _lost(self, lost: WorkerLostError) -> None:
        if self._may_draft:
            self._stats.lost_drafts += 1
            self._fall_back(LOST, str(lost))

    def _give_up(self) -> None:
        """The drafter has nothing to say: most often the context or the cache of a draft is full."""
        assert self._drafter is not None
        if self._empty == MANY_EMPTY and self._drafter.asks_a_worker:  # a text without repeats is no fault
            self._stats.empty_drafts += 1
        self._fall_back(EMPTY, f"{self._empty} in a row")

    def _fall_back(self, reason: str, detail: str) -> None:
        """To plain decoding, until the drafter has recovered."""
        self._may_draft, self.reason = False, reason
        if reason != EMPTY:
            self._empty = 0
        self._trace.event("fallback", f"{reason}: {detail}")


async def _never() -> NoReturn:
    await asyncio.Future[NoReturn]()
    raise AssertionError("nobody resolves it")
