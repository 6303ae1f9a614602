"""The phases of a sequence at one target: its prompt, plain decoding, rounds.

A phase yields what it commits. After that ``next`` is the phase that follows; None: the sequence is finished.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gateway.errors import GatewayError
from gateway.events import (
    AheadDropped,
    DraftAwaited,
    Ended,
    Events,
    PlainBegan,
    RoundBegan,
    SendingAhead,
    TokenDecoded,
    VerdictReceived,
)
from gateway.loop.answer_trace import NoTrace
from gateway.loop.draft_source import DraftSource
from gateway.loop.lease import is_used_up, longest_lease
from gateway.loop.target_turns import Committed, TargetTurns
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.sequence import GatewaySequence, Origin
from outrider.decoding.lease import NO_LEASE
from outrider.telemetry.reasons import SpanReason
from protos import rounds_pb2


@dataclass(frozen=True)
class PhaseContext:
    """Objects that the phases of a sequence at one target share."""

    sequence: GatewaySequence
    turns: TargetTurns
    source: DraftSource
    events: Events
    trace: NoTrace


class SequencePhase(ABC):
    """Base of the three phases."""

    reason: str  # reason of the current depth

    def __init__(self, context: PhaseContext) -> None:
        self._sequence = context.sequence
        self._turns = context.turns
        self._source = context.source
        self._events = context.events
        self._trace = context.trace
        self._context = context
        self.next: SequencePhase | None = None

    @abstractmethod
    def run(self) -> AsyncGenerator[Committed, None]:
        """Yields each commit. Raises what ``TargetTurns.reply`` and ``commit`` raise."""

    def _plain_token(self, reply: rounds_pb2.TargetReply, target_s: float) -> Committed:
        tokens = self._turns.commit(reply, Origin.PLAIN)
        self._events.emit(TokenDecoded(reply, target_s))
        return Committed(tokens, self._sequence.finish_reason)


class PromptPhase(SequencePhase):
    """Log-probabilities of the prompt. After a loss another target scores the remaining tokens."""

    reason = ""

    async def run(self) -> AsyncGenerator[Committed, None]:
        sequence = self._sequence
        if sequence.unscored:
            self._turns.score(start=1 + len(sequence.scores))
        while sequence.unscored:
            reply, _ = await self._turns.reply()
            self._turns.commit_scores(reply)
        sequence.round += 1
        if not sequence.generates:
            sequence.finish_reason = "length"
        yield Committed((), sequence.finish_reason, scores=tuple(sequence.scores))


class PlainPhase(SequencePhase):
    """Plain decoding without a turn per token, until there is a Draft and rounds pay.

    Backpressure: the lease is not renewed while the client does not read.
    """

    def __init__(self, context: PhaseContext, reason: str) -> None:
        """reason: why there are no Drafts."""
        super().__init__(context)
        self.reason = reason

    async def run(self) -> AsyncGenerator[Committed, None]:
        sequence, lease = self._sequence, NO_LEASE
        self._events.emit(PlainBegan(self.reason))
        resuming = asyncio.create_task(self._source.resume(self._trace.request))
        try:
            while sequence.finish_reason is None and not resuming.done():
                if is_used_up(lease, sequence):
                    lease = longest_lease(sequence)
                    self._turns.decode(self._trace.current, lease=lease)
                reply, target_s = await self._turns.reply()
                yield self._plain_tokens(reply, target_s)
            if sequence.finish_reason is None:
                proposal, reason = resuming.result()
                plain_round = sequence.round if sequence.is_coupled else None
                self.next = RoundPhase(self._context, self._source.overtaken(proposal), reason, plain_round)
        finally:
            self._events.emit(Ended(SpanReason.PLAIN))
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)

    def _plain_tokens(self, reply: rounds_pb2.TargetReply, target_s: float) -> Committed:
        """Commits a reply, and the replies that came while the gateway was busy; returns all their tokens.

        The tokens are sent to the client together, so a busy gateway has less work per token and catches up.
        """
        committed = self._plain_token(reply, target_s)
        while committed.finish_reason is None and (more := self._turns.arrived()) is not None:
            following = self._plain_token(more, 0.0)
            committed = replace(following, tokens=committed.tokens + following.tokens)
        return committed


@dataclass(frozen=True, slots=True)
class Idle:
    """The target waits for a Draft."""


@dataclass(frozen=True, slots=True)
class Verifying:
    """The target judges a Draft that follows the committed tokens."""


@dataclass(frozen=True, slots=True)
class VerifyingAhead:
    """The target judges a Draft, then continues with the part of ``ahead`` that follows the Verdict."""

    ahead: Proposal


class RoundPhase(SequencePhase):
    """Rounds, until the sequence is finished, rounds no longer pay, or there is no Draft.

    The target may already be in the next round. Then it was sent a Draft before the Verdict, or it continues
    by itself with the Draft of its own drafter.
    """

    def __init__(
        self, context: PhaseContext, first: Proposal, reason: str, plain_round: int | None = None
    ) -> None:
        """
        Args:
            reason: reason of the depth of the first Draft.
            plain_round: round of the plain decoding before, whose last tokens may still arrive; None: such
                tokens are dropped.
        """
        super().__init__(context)
        self.reason = reason
        self._first = first
        self._plain_round = plain_round
        self._state: Idle | Verifying | VerifyingAhead = Idle()
        self._lease = NO_LEASE

    async def run(self) -> AsyncGenerator[Committed, None]:
        sequence, clock = self._sequence, asyncio.get_running_loop().time
        proposal: Proposal | None = self._first
        is_continued, draft_s = False, self._first.seconds
        self._events.emit(RoundBegan(self.reason if self._first.draft else SpanReason.FIRST_TOKEN))
        while proposal is not None:
            if isinstance(self._state, Idle):
                self._state, self._lease = Verifying(), self._source.lease()
                self._turns.decode(self._trace.current, proposal.draft, self._lease)
            with self._sending_ahead(proposal):
                reply, target_s = await self._turns.reply(self._plain_round)
                while reply.round == self._plain_round:
                    yield self._plain_token(reply, 0.0)  # the wait is counted in the Verdict's wait
                    if sequence.finish_reason is not None:
                        self._events.emit(Ended(self.reason))
                        return
                    proposal = self._source.overtaken(proposal)
                    reply, more_s = await self._turns.reply(self._plain_round)
                    target_s += more_s
            committed = self._verdict(
                VerdictReceived(proposal, reply, self.reason, is_continued, draft_s, target_s)
            )
            depth = 0
            if sequence.finish_reason is None:
                depth, self.reason = self._source.depth()
            following = self._following(depth)
            is_continued = following is not None
            if depth > 0:
                # The next Draft is made while this Verdict's tokens travel to the client.
                sequence.round += not is_continued
                self._events.emit(RoundBegan(self.reason, waits=not is_continued, continued=is_continued))
                self._source.begin(depth, self._trace.request if is_continued else self._trace.current)
            yield committed
            if depth == 0:
                break
            if is_continued:
                self._renew()
            started = clock()
            proposal = following or await self._source.proposal()
            draft_s = clock() - started
            self._events.emit(DraftAwaited(draft_s))
        else:
            _, self.reason = self._source.depth()
            self._events.emit(Ended(self.reason))
        if sequence.finish_reason is None:
            self.next = PlainPhase(self._context, self.reason)

    def _verdict(self, verdict: VerdictReceived) -> Committed:
        has_draft = bool(verdict.proposal.draft)
        own = Origin.PLAIN
        if has_draft:
            own = Origin.TARGET if verdict.drafted_end is None else Origin.ACCEPTED
        tokens = self._turns.commit(verdict.reply, own)
        if verdict.reply.continues:
            ahead = self._source.continued()
            self._state = Verifying() if ahead is None else VerifyingAhead(ahead)
        self._events.emit(verdict)
        return Committed(tokens, self._sequence.finish_reason, verdict if has_draft else None)

    def _following(self, depth: int) -> Proposal | None:
        """Returns the Draft that the target already verifies in the next round; None: the target waits.

        depth: tokens of the next Draft; 0: no Draft is wanted.
        """
        state, self._state = self._state, Idle()
        ahead = state.ahead.trimmed(self._sequence) if isinstance(state, VerifyingAhead) else NO_PROPOSAL
        if not ahead.draft:
            return None
        if depth == 0:
            if self._sequence.finish_reason is None:
                self._events.emit(AheadDropped(self.reason))
            return None
        self._state = Verifying()
        return ahead

    @contextmanager
    def _sending_ahead(self, proposal: Proposal) -> Iterator[None]:
        """Runs ``_send_ahead`` as a task until the Verdict comes."""
        sending = None
        if proposal.draft and self._source.may_prepare:
            sending = asyncio.create_task(self._send_ahead())
        try:
            yield
        finally:
            if sending is not None:
                sending.cancel()

    async def _send_ahead(self) -> None:
        """Sends the target the Drafts for the likely verdicts while it verifies the current Draft."""
        prepared = await self._source.prepared()
        prepared = None if prepared is None else prepared.trimmed(self._sequence)
        if prepared is None or not prepared.draft:
            return
        self._state = VerifyingAhead(prepared)
        self._events.emit(SendingAhead(prepared))
        try:
            self._turns.decode(self._trace.ahead, prepared.draft)
        except GatewayError:  # the wait for the Verdict raises the same error
            self._state = Verifying()

    def _renew(self) -> None:
        """Extends the lease of a target that continues by itself, or changes the depth and alternatives."""
        before, lease = self._lease, self._source.lease()
        if not lease.until or (lease.asks_like(before) and not is_used_up(before, self._sequence)):
            return
        self._lease = lease
        self._turns.decode(self._trace.current, lease=lease)
