"""The draft-then-verify loop of one sequence. The loss of a worker is handled here and only here."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from gateway.drafters.drafters import DRAFTERS
from gateway.errors import (
    DeadlineError,
    GatewayError,
    SequenceFailedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.observe.answer_trace import NO_TRACE, NoTrace
from gateway.observe.stats import Stats
from gateway.rounds.drafting import LAST_TOKEN, Drafting
from gateway.rounds.paces import Paces
from gateway.rounds.proposal import NO_PROPOSAL, Proposal, refused
from gateway.rounds.sequence import Origin, Sequence, Token
from gateway.settings import GatewaySettings, Priority, Speculation
from gateway.workers.fleet import Fleet, TargetStream
from protos import rounds_pb2

logger = logging.getLogger("ray.serve")

PLAIN_STRETCH = 64  # tokens granted at a time in plain mode; half of them used up asks for more
FIRST_TOKEN, LOST_TARGET = "first token", "lost target worker"  # reasons in traces
OF_ENGINE, OF_LOSSES = "engine", "lost targets"  # reasons of failures
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.02, 1.0  # between attempts to open a lost target again


@dataclass(frozen=True)
class Step:
    """What one Verdict added to the sequence. The last one has a finish_reason."""

    tokens: tuple[Token, ...]
    finish_reason: str | None  # "stop" or "length"
    round: "Round | None" = None  # None: plain decoding


@dataclass(frozen=True)
class Round:
    """One Draft and its Verdict, and how long each was waited for."""

    proposal: Proposal
    reply: rounds_pb2.TargetReply
    reason: str  # of the depth
    continued: bool  # the target had the Draft before the Verdict before it fell
    draft_s: float
    target_s: float


class Rounds:
    """Generates one sequence; ``steps`` can be run once."""

    def __init__(
        self,
        sequence: Sequence,
        fleet: Fleet,
        speculation: Speculation,
        paces: Paces,
        settings: GatewaySettings,
        deadline: float,
        task: str | None = None,
        priority: Priority = "interactive",
        stats: Stats | None = None,
        trace: NoTrace = NO_TRACE,
    ) -> None:
        """
        Args:
            speculation: resolved.
            deadline: when to give up, in the event loop's time.
            task: label under which acceptance is counted.
            record: counts what happens; None: one of its own.
            trace: for the spans of its rounds.
        """
        self._sequence = sequence
        self._fleet = fleet
        self._paces = paces
        self._deadline = deadline
        self._max_losses = settings.max_losses
        self.stats = Stats() if stats is None else stats
        self._trace = trace
        drafter = None
        if speculation.mode != "off" and speculation.drafter is not None:
            drafter = DRAFTERS[speculation.drafter](fleet, sequence)
        paced = paces.sequence(speculation, task, priority)
        longest_wait_s = settings.propose_deadline_ms / 1e3
        self._drafting = Drafting(
            sequence, drafter, speculation, paced, self.stats, longest_wait_s, self._extend, trace
        )
        self._resumed: Proposal | None = None  # the Draft with which rounds go on after plain decoding
        self._verifying: TargetStream | None = None  # has a Draft that follows the committed tokens
        self._ahead: Proposal | None = None  # the Drafts of this turn that it was sent beforehand

    @property
    def depth(self) -> int:
        """In force for the next Draft, tokens; 0: plain decoding."""
        return self._drafting.depth_in_force

    @property
    def reason(self) -> str:
        """What decides it; see telemetry.metrics.REASONS."""
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
                    async with (
                        aclosing(self._fleet.open_target(self._sequence, apart=losses > 0)) as target,
                        aclosing(self._with(target)) as steps,
                    ):
                        async for step in steps:
                            failures = losses = 0
                            self._fleet.passed(target)
                            yield step
                except WorkerLostError as lost:
                    failures += 1
                    losses += isinstance(lost, SequenceLostError)
                    self._trace.end(LOST_TARGET)
                    if losses == self._max_losses:
                        raise self._failed(losses, lost) from lost
                    self._trace.event("reopening", str(lost))
                    await self._before_retry(failures, lost)
        except SequenceFailedError as error:
            self.stats.failures[OF_LOSSES if losses else OF_ENGINE] += 1
            logger.error("a request fails: %s", error)
            raise
        finally:
            self._trace.end("ended")
            await self._drafting.aclose()

    def _failed(self, losses: int, lost: WorkerLostError) -> SequenceFailedError:
        return SequenceFailedError(
            f"{losses} target workers were lost with this request, without a token in between: max_losses="
            f"{self._max_losses} allows no further; the last one: {lost}"
        )

    async def _before_retry(self, failures: int, lost: WorkerLostError) -> None:
        """The first attempt to go on elsewhere follows at once, later ones after growing pauses."""
        if failures == 1:
            self.stats.lost_targets += 1
            return
        pause_s = min(SHORTEST_RETRY_S * 2**failures, LONGEST_RETRY_S)
        if asyncio.get_running_loop().time() + pause_s > self._deadline:
            raise DeadlineError(f"no target before the request's deadline: {lost}")
        await asyncio.sleep(pause_s)

    async def _with(self, target: TargetStream) -> AsyncGenerator[Step, None]:
        """Rounds while they pay, plain decoding while they do not."""
        with self._drafting.at(self._paces.of_target(target.address)):
            self._verifying = self._ahead = None
            proposal = NO_PROPOSAL if self._drafting.depth() > 0 else None
            while self._sequence.finish_reason is None:
                stretch = self._plain(target) if proposal is None else self._speculative(target, proposal)
                async with aclosing(stretch) as steps:
                    async for step in steps:
                        yield step
                self._sequence.round += 1
                proposal, self._resumed = self._resumed, None
                if self._sequence.finish_reason is None and self.reason != LAST_TOKEN:
                    kind = "off" if proposal is None else "on"
                    self.stats.transitions[kind, self.reason] += 1

    async def _speculative(self, target: TargetStream, first: Proposal) -> AsyncGenerator[Step, None]:
        """Rounds, until the sequence is finished, they no longer pay, or there is no Draft.

        Where the target was sent what follows a Verdict before it fell, it is at the next one already.
        """
        proposal: Proposal | None = first
        continues, draft_s = False, first.seconds
        self._trace.begin(self._drafting.reason if first.draft.tokens else FIRST_TOKEN)
        while proposal is not None:
            if self._verifying is None:
                self._verifying = target
                await target.send(self._verify(target, proposal, self._trace.current))
            step = await self._verdict(target, proposal, continues, draft_s)
            depth = self._drafting.depth() if step.finish_reason is None else 0
            following = None if self._ahead is None else self._ahead.trimmed(self._sequence)
            ahead_hit = following is not None and len(following.draft.tokens) > 0
            continues = ahead_hit and depth > 0
            if not continues:
                self._verifying = self._ahead = None
            if ahead_hit and not continues and step.finish_reason is None:
                self._trace.forgo(self._drafting.reason)
            if depth > 0:
                # Drafting goes on while this verdict's tokens travel to the client.
                self._sequence.round += not continues
                self._trace.begin(self._drafting.reason, waits=not continues, continued=continues)
                self._drafting.begin(depth, self._trace.request if continues else self._trace.current)
            yield step
            if depth == 0:
                return
            self.stats.continued += continues
            begun = asyncio.get_running_loop().time()
            proposal = following if continues else await self._drafting.proposal()
            draft_s = asyncio.get_running_loop().time() - begun
            self.stats.draft_s += draft_s
        self._trace.end(self._drafting.reason)

    def _verify(self, target: TargetStream, proposal: Proposal, traceparent: str) -> rounds_pb2.TargetRequest:
        """The Draft goes on as it came."""
        turn = target.turn(self._sequence.round, traceparent)
        return rounds_pb2.TargetRequest(verify=rounds_pb2.Verify(turn=turn, draft=proposal.draft))

    async def _extend(self, prepared: Proposal) -> None:
        """Sends the target what follows the likely verdicts, while it verifies."""
        if self._verifying is None or prepared.base != len(self._sequence):
            return
        self._ahead = prepared
        verify = self._verify(self._verifying, prepared, self._trace.ahead(prepared))
        try:
            await self._verifying.send(verify)
        except GatewayError:  # whoever waits for the Verdict notices too
            self._ahead = None

    async def _verdict(
        self, target: TargetStream, proposal: Proposal, continued: bool, draft_s: float
    ) -> Step:
        draft = proposal.draft
        begun = asyncio.get_running_loop().time()
        reply = await self._reply(target)
        passed_s = asyncio.get_running_loop().time() - begun
        self.stats.target_s += passed_s
        overhead_s = 0.0 if continued else passed_s - reply.timings.total_ns / 1e9
        if draft.tokens:
            self.stats.rounds += 1
            self.stats.drafted += len(draft.tokens)
            self.stats.accepted_lengths[len(reply.accepted)] += 1
            self.stats.verified += len(reply.accepted) + refused(draft, reply)
        step = self._commit(reply, Origin.TARGET if draft.tokens else Origin.PLAIN)
        if draft.tokens:
            step = replace(step, round=Round(proposal, reply, self.reason, continued, draft_s, passed_s))
        self._trace.verdict(proposal, reply, overhead_s, len(reply.tokens))
        self._drafting.answered(proposal, reply, overhead_s)
        return step

    async def _plain(self, target: TargetStream) -> AsyncGenerator[Step, None]:
        """Plain decoding without a turn per token, until there is a Draft and rounds pay.

        A client that does not read stops the grants.
        """
        self._trace.begin_stretch(self._drafting.reason)
        resuming = asyncio.create_task(self._drafting.resume())
        until = 0
        try:
            while self._sequence.finish_reason is None and not resuming.done():
                if until - len(self._sequence) <= PLAIN_STRETCH // 2 and until < self._sequence.limit:
                    until = min(len(self._sequence) + PLAIN_STRETCH, self._sequence.limit)
                    turn = target.turn(self._sequence.round, self._trace.current)
                    plain = rounds_pb2.Plain(turn=turn, until=until)
                    await target.send(rounds_pb2.TargetRequest(plain=plain))
                begun = asyncio.get_running_loop().time()
                reply = await self._reply(target)
                self.stats.target_s += asyncio.get_running_loop().time() - begun
                step = self._commit(reply, Origin.PLAIN)
                self._trace.plain_token(reply)
                self._drafting.answered(NO_PROPOSAL, reply)
                yield step
            if self._sequence.finish_reason is None:
                self._resumed = resuming.result().trimmed(self._sequence)
        finally:
            self._trace.end("plain")
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)

    async def _reply(self, target: TargetStream) -> rounds_pb2.TargetReply:
        left = self._deadline - asyncio.get_running_loop().time()
        reply = await target.receive(self._sequence.round, max(left, 0.0))
        if reply is None:
            raise DeadlineError("the answer was not finished before the request's deadline")
        return reply

    def _commit(self, reply: rounds_pb2.TargetReply, own: Origin) -> Step:
        origins = [Origin.ACCEPTED] * len(reply.accepted) + [own]
        logprobs = reply.logprobs or [None] * len(reply.tokens)
        self._sequence.generated.extend(reply.tokens)
        self._sequence.finish_reason = reply.finish_reason or None
        self.stats.target_passes += 1
        tokens = tuple(map(Token, reply.tokens, origins, logprobs))
        return Step(tokens, self._sequence.finish_reason)
