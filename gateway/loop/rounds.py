"""The draft-then-verify loop of one sequence. The loss of a worker is handled here and only here."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass

from gateway.drafters.received import received_draft
from gateway.errors import (
    DeadlineError,
    GatewayError,
    SequenceFailedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.events import (
    DraftAwaited,
    Ended,
    Events,
    Failed,
    Forgone,
    RoundBegan,
    SendingAhead,
    StretchBegan,
    Switched,
    TargetLost,
    TokenDecoded,
    VerdictFell,
)
from gateway.loop.answer_trace import NoTrace
from gateway.loop.drafting import Drafting
from gateway.loop.stats import Stats
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence, Origin, Token
from gateway.workers.fleet import Fleet, TargetStream
from outrider.telemetry.reasons import DepthReason, FailureReason, SpanReason
from protos import rounds_pb2
from protos.conversions import draft_to_message, step_from_message
from protos.generation_pb2 import TokenLogprobs

logger = logging.getLogger("ray.serve")

STRETCH = 64  # tokens that a target is let go on by itself; half of them used up asks for more
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.02, 1.0  # between attempts to open a lost target again


@dataclass(frozen=True)
class Step:
    """What one Verdict added to the sequence, or told of its prompt. The last one has a finish_reason."""

    tokens: tuple[Token, ...]
    finish_reason: str | None  # "stop" or "length"
    round: VerdictFell | None = None  # None: plain decoding
    scores: tuple[TokenLogprobs, ...] = ()  # of the prompt, before any token


@dataclass(frozen=True)
class Grant:
    """What the target may do by itself."""

    until: int = 0  # length of the sequence
    depth: int = 0  # of the Drafts that come with its verdicts
    leaves: int = 0


@dataclass(frozen=True)
class Limits:
    """Where a sequence is given up."""

    deadline: float  # in the event loop's time
    max_losses: int  # of targets, without a token in between


class Rounds:
    """Generates one sequence; ``steps`` can be run once."""

    def __init__(
        self,
        sequence: GatewaySequence,
        fleet: Fleet,
        paces: Paces,
        drafting: Drafting,
        events: Events,
        stats: Stats,
        trace: NoTrace,
        limits: Limits,
    ) -> None:
        """stats, trace: that listen to the events."""
        self._sequence = sequence
        self._fleet = fleet
        self._paces = paces
        self._drafting = drafting
        self._events = events
        self.stats = stats
        self._trace = trace
        self._limits = limits
        self._resumed: Proposal | None = None  # the Draft with which rounds go on after plain decoding
        self._is_verifying = False  # the target has a Draft that follows the committed tokens
        self._ahead: Proposal | None = None  # what it goes on with, if the Verdict leaves something of that
        self._granted = Grant()

    @property
    def depth(self) -> int:
        """In force for the next Draft, tokens; 0: plain decoding."""
        return self._drafting.depth_in_force

    @property
    def reason(self) -> str:
        """What decides it; a DepthReason."""
        return self._drafting.reason

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Each Verdict once its tokens are committed.

        Losing the draft only ends drafting until there is another. When the target is lost another goes on
        from the committed tokens: by the same noise to the same text. Whether it was this sequence that ended
        the target nobody knows, so it is opened apart from others like it, and not for ever.

        Raises:
            DeadlineError: the deadline passed first.
            InvalidRequestError: no target can serve such a sequence.
            SequenceFailedError: a target's engine cannot go on with it, or max_losses targets were lost.
        """
        failures = losses = 0  # in a row: of attempts, and of targets that had the sequence
        self._sequence.round += 1
        try:
            while self._sequence.finish_reason is None:
                try:
                    with closing(self._fleet.open_target(self._sequence, apart=losses > 0)) as target:
                        async with aclosing(self._with(target)) as steps:
                            async for step in steps:
                                failures = losses = 0
                                self._fleet.passed(target)
                                yield step
                except WorkerLostError as lost:
                    failures += 1
                    losses += isinstance(lost, SequenceLostError)
                    self._events.emit(Ended(SpanReason.LOST_TARGET))
                    if losses == self._limits.max_losses:
                        raise self._failed(losses, lost) from lost
                    self._events.emit(TargetLost(str(lost), is_first=failures == 1))
                    await self._before_retry(failures, lost)
        except SequenceFailedError as error:
            self._events.emit(Failed(FailureReason.LOST_TARGETS if losses else FailureReason.ENGINE))
            logger.error("a request fails: %s", error)
            raise
        finally:
            self._events.emit(Ended(SpanReason.ENDED))
            await self._drafting.aclose()

    def _failed(self, losses: int, lost: WorkerLostError) -> SequenceFailedError:
        return SequenceFailedError(
            f"{losses} target workers were lost with this request, without a token in between: max_losses="
            f"{self._limits.max_losses} allows no further; the last one: {lost}"
        )

    async def _before_retry(self, failures: int, lost: WorkerLostError) -> None:
        """The first attempt to go on elsewhere follows at once, later ones after growing pauses."""
        if failures == 1:
            return
        pause_s = min(SHORTEST_RETRY_S * 2**failures, LONGEST_RETRY_S)
        if asyncio.get_running_loop().time() + pause_s > self._limits.deadline:
            raise DeadlineError(f"no target before the request's deadline: {lost}")
        await asyncio.sleep(pause_s)

    async def _with(self, target: TargetStream) -> AsyncGenerator[Step, None]:
        """Rounds while they pay, plain decoding while they do not; before them what is told of the prompt."""
        if self._sequence.unscored or not self._sequence.generates:
            yield await self._about_prompt(target)
        with self._drafting.at(self._paces.of_target(target.address)):
            self._is_verifying, self._ahead = False, None
            proposal = NO_PROPOSAL if self._drafting.depth() > 0 else None
            stretch: int | None = None
            while self._sequence.finish_reason is None:
                is_plain = proposal is None
                part = (
                    self._plain(target) if proposal is None else self._speculative(target, proposal, stretch)
                )
                async with aclosing(part) as steps:
                    async for step in steps:
                        yield step
                stretch = self._sequence.round if is_plain and self._sequence.is_coupled else None
                self._sequence.round += 1
                proposal, self._resumed = self._resumed, None
                if self._sequence.finish_reason is None and self.reason != DepthReason.LAST_TOKEN:
                    kind = "off" if proposal is None else "on"
                    self._events.emit(Switched(kind, self.reason))

    async def _about_prompt(self, target: TargetStream) -> Step:
        """The log-probabilities of its tokens, if they are wanted. Another target goes on with the rest."""
        sequence = self._sequence
        if sequence.unscored:
            turn = target.turn(sequence.round, self._trace.request)
            score = rounds_pb2.Score(turn=turn, start=1 + len(sequence.scores))
            target.send(rounds_pb2.TargetRequest(score=score))
        while sequence.unscored:
            reply, _ = await self._reply(target)
            if reply.tokens or not 0 < len(reply.logprobs) <= sequence.unscored:
                raise target.lost("its answer to a Score tells other than the prompt's tokens")
            sequence.scores += reply.logprobs
        sequence.round += 1
        if not sequence.generates:
            sequence.finish_reason = "length"
        return Step((), sequence.finish_reason, scores=tuple(sequence.scores))

    async def _speculative(
        self, target: TargetStream, first: Proposal, stretch: int | None
    ) -> AsyncGenerator[Step, None]:
        """Rounds, until the sequence is finished, they no longer pay, or there is no Draft.

        Where the target was sent what follows a Verdict before it fell, or goes on by itself with the Draft
        of the drafter beside it, it is at the next one already.

        stretch: round of the plain stretch before, of which tokens that count may still come.
        """
        proposal: Proposal | None = first
        continues, draft_s = False, first.seconds
        self._events.emit(RoundBegan(self.reason if first.draft else SpanReason.FIRST_TOKEN))
        while proposal is not None:
            if not self._is_verifying:
                self._is_verifying = True
                target.send(self._verify(target, proposal))
            with self._extending(target, proposal):
                reply, target_s = await self._reply(target, stretch)
                while reply.round == stretch:
                    yield await self._decoded(target, reply, 0.0)  # its wait is a part of the Verdict's
                    if self._sequence.finish_reason is not None:
                        self._events.emit(Ended(self.reason))
                        return
                    proposal = self._drafting.overtaken(proposal)
                    reply, more_s = await self._reply(target, stretch)
                    target_s += more_s
            fell = VerdictFell(proposal, reply, self.reason, continues, draft_s, target_s)
            step = await self._verdict(target, fell)
            depth = self._drafting.depth() if step.finish_reason is None else 0
            following = None if self._ahead is None else self._ahead.trimmed(self._sequence)
            was_foreseen = following is not None and len(following.draft) > 0
            continues = was_foreseen and depth > 0
            if not continues:
                self._is_verifying, self._ahead = False, None
            if was_foreseen and not continues and step.finish_reason is None:
                self._events.emit(Forgone(self.reason))
            if depth > 0:
                # Drafting goes on while this verdict's tokens travel to the client.
                self._sequence.round += not continues
                self._events.emit(RoundBegan(self.reason, waits=not continues, continued=continues))
                self._drafting.begin(depth, self._trace.request if continues else self._trace.current)
            yield step
            if depth == 0:
                return
            if continues:
                self._renew(target)
            begun = asyncio.get_running_loop().time()
            proposal = following if continues else await self._drafting.proposal()
            draft_s = asyncio.get_running_loop().time() - begun
            self._events.emit(DraftAwaited(draft_s))
        self._events.emit(Ended(self.reason))

    def _verify(self, target: TargetStream, proposal: Proposal) -> rounds_pb2.TargetRequest:
        self._granted = grant = self._grant()
        verify = rounds_pb2.Verify(
            turn=target.turn(self._sequence.round, self._trace.current),
            draft=draft_to_message(proposal.draft),
            next_depth=grant.depth,
            next_leaves=grant.leaves,
            until=grant.until,
        )
        return rounds_pb2.TargetRequest(verify=verify)

    def _grant(self) -> Grant:
        """With a drafter of its own the target goes on as in plain decoding."""
        depth, leaves = self._drafting.wanted_beside_target
        return Grant(self._end_of_stretch if self._drafting.target_may_continue else 0, depth, leaves)

    def _renew(self, target: TargetStream) -> None:
        """Lets a target that goes on by itself go further, or with other Drafts than before."""
        granted, grant = self._granted, self._grant()
        is_as_before = (grant.depth, grant.leaves) == (granted.depth, granted.leaves)
        if not grant.until or (is_as_before and not self._is_used_up(granted.until)):
            return
        self._granted = grant
        top_up = rounds_pb2.TopUp(
            turn=target.turn(self._sequence.round, self._trace.current),
            until=grant.until,
            next_depth=grant.depth,
            next_leaves=grant.leaves,
        )
        target.send(rounds_pb2.TargetRequest(top_up=top_up))

    @property
    def _end_of_stretch(self) -> int:
        """Length of the sequence to which the target may go on from here by itself."""
        return min(len(self._sequence) + STRETCH, self._sequence.limit)

    def _is_used_up(self, until: int) -> bool:
        """Whether enough of a stretch is, that the target has to be told of the next one."""
        return until - len(self._sequence) <= STRETCH // 2 and until < self._sequence.limit

    async def _extend(self, target: TargetStream) -> None:
        """Sends the target what follows the likely verdicts, while it verifies."""
        prepared = await self._drafting.prepared()
        prepared = None if prepared is None else prepared.trimmed(self._sequence)
        if prepared is None or not prepared.draft:
            return
        self._ahead = prepared
        self._events.emit(SendingAhead(prepared))
        turn = target.turn(self._sequence.round, self._trace.ahead)
        extend = rounds_pb2.Extend(turn=turn, draft=draft_to_message(prepared.draft))
        try:
            target.send(rounds_pb2.TargetRequest(extend=extend))
        except GatewayError:  # whoever waits for the Verdict notices too
            self._ahead = None

    @contextmanager
    def _extending(self, target: TargetStream, proposal: Proposal) -> Iterator[None]:
        """Until the Verdict is there."""
        extending = asyncio.create_task(self._extend(target)) if proposal.draft else None
        try:
            yield
        finally:
            if extending is not None:
                extending.cancel()

    async def _verdict(self, target: TargetStream, fell: VerdictFell) -> Step:
        has_draft = bool(fell.proposal.draft)
        own = Origin.PLAIN
        if has_draft:
            own = Origin.TARGET if fell.drafted_end is None else Origin.ACCEPTED
        tokens = await self._commit(target, fell.reply, own)
        if fell.reply.continues:
            self._ahead = self._drafting.continued()
        self._events.emit(fell)
        return Step(tokens, self._sequence.finish_reason, fell if has_draft else None)

    async def _decoded(self, target: TargetStream, reply: rounds_pb2.TargetReply, target_s: float) -> Step:
        tokens = await self._commit(target, reply, Origin.PLAIN)
        self._events.emit(TokenDecoded(reply, target_s))
        return Step(tokens, self._sequence.finish_reason)

    async def _plain(self, target: TargetStream) -> AsyncGenerator[Step, None]:
        """Plain decoding without a turn per token, until there is a Draft and rounds pay.

        A client that does not read stops the grants.
        """
        self._events.emit(StretchBegan(self.reason))
        resuming = asyncio.create_task(self._drafting.resume(self._trace.request))
        until = 0
        try:
            while self._sequence.finish_reason is None and not resuming.done():
                if self._is_used_up(until):
                    is_first, until = not until, self._end_of_stretch
                    target.send(self._plainly(target, until, is_first=is_first))
                reply, target_s = await self._reply(target)
                yield await self._decoded(target, reply, target_s)
            if self._sequence.finish_reason is None:
                self._resumed = self._drafting.overtaken(resuming.result())
        finally:
            self._events.emit(Ended(SpanReason.PLAIN))
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)

    def _plainly(self, target: TargetStream, until: int, *, is_first: bool) -> rounds_pb2.TargetRequest:
        turn = target.turn(self._sequence.round, self._trace.current)
        if is_first:
            return rounds_pb2.TargetRequest(plain=rounds_pb2.Plain(turn=turn, until=until))
        return rounds_pb2.TargetRequest(top_up=rounds_pb2.TopUp(turn=turn, until=until))

    async def _reply(
        self, target: TargetStream, stretch: int | None = None
    ) -> tuple[rounds_pb2.TargetReply, float]:
        """With the seconds of the wait for it. stretch: a round before, of which replies are wanted too."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        reply = await target.receive(self._sequence.round, max(self._limits.deadline - begun, 0.0), stretch)
        if reply is None:
            raise DeadlineError("the answer was not finished before the request's deadline")
        return reply, clock() - begun

    async def _commit(
        self, target: TargetStream, reply: rounds_pb2.TargetReply, own: Origin
    ) -> tuple[Token, ...]:
        """Nothing of a reply whose Draft others would refuse: its target counts as lost."""
        draft, rule = None, self._sequence.sampling.verification
        try:
            if reply.HasField("draft"):
                draft = received_draft(reply.draft, rule, self._fleet.vocab_size())
        except ValueError as error:
            raise target.lost(str(error)) from error
        of_grammar = set(reply.forced_nodes)
        origins = [Origin.FORCED if node in of_grammar else Origin.ACCEPTED for node in reply.accepted]
        origins += [Origin.FORCED] * reply.forced + [own]
        logprobs = reply.logprobs or [None] * len(reply.tokens)
        self._sequence.generated.extend(reply.tokens)
        self._sequence.finish_reason = reply.finish_reason or None
        self._sequence.draft = draft
        if reply.HasField("draft_step"):
            self._sequence.draft_step = step_from_message(reply.draft_step)
        self._drafting.grew()
        return tuple(map(Token, reply.tokens, origins, logprobs))
