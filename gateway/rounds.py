"""The draft-then-verify loop of one sequence. The loss of a worker is handled here and only here."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.drafters import DRAFTERS, NO_DRAFT, Drafter
from gateway.errors import DeadlineError, WorkerLostError
from gateway.fleet import Fleet, TargetStream
from gateway.sequence import Origin, Sequence, Token
from gateway.settings import GatewaySettings, Speculation
from protos import rounds_pb2

PLAIN_STRETCH = 64  # tokens granted at a time in plain mode; half of them used up asks for more
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.02, 1.0  # between attempts to open a lost target again


@dataclass
class Record:
    """What speculation did for one sequence, or for several together."""

    rounds: int = 0  # verdicts on a Draft that was not empty
    drafted: int = 0  # tokens
    verified: int = 0  # drafted tokens whose position was reached
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # rounds by accepted tokens
    target_passes: int = 0  # verdicts, with a Draft or without
    late_drafts: int = 0  # times that a Draft missed its deadline
    lost_drafts: int = 0  # times that the draft worker was lost
    lost_targets: int = 0  # times that the target worker was lost

    @property
    def accepted(self) -> int:
        """Drafted tokens that stand."""
        return sum(length * rounds for length, rounds in self.accepted_lengths.items())

    @property
    def mean_accepted_length(self) -> float:
        """Accepted tokens per round; 0 without rounds."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def histogram(self) -> list[int]:
        """Rounds that accepted 0, 1, 2, ... tokens."""
        return [self.accepted_lengths[n] for n in range(max(self.accepted_lengths, default=-1) + 1)]

    def add(self, other: "Record") -> None:
        """Counts another sequence in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Step:
    """What one Verdict added to the sequence. The last one has a finish_reason."""

    tokens: tuple[Token, ...]
    finish_reason: str | None  # "stop" or "length"


class Rounds:
    """Generates one sequence; ``steps`` can be run once."""

    def __init__(
        self,
        sequence: Sequence,
        fleet: Fleet,
        speculation: Speculation,
        settings: GatewaySettings,
        deadline: float,
    ) -> None:
        """deadline: when to give up, in the event loop's time."""
        self._sequence = sequence
        self._fleet = fleet
        self._depth = speculation.depth if speculation.mode != "off" else None
        self._drafter: Drafter | None = None
        if self._depth is not None and speculation.drafter is not None:
            self._drafter = DRAFTERS[speculation.drafter](fleet, sequence, settings)
        self._may_draft = True  # until a Draft is late or lost, and again once the drafter has recovered
        self._drafting: asyncio.Task[rounds_pb2.Draft]
        self._deadline = deadline
        self.record = Record()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Each Verdict once its tokens are committed.

        Losing the draft only ends drafting until there is another. When the target is lost another goes on
        from the committed tokens: by the same noise to the same text.

        Raises:
            DeadlineError: the deadline passed first.
            InvalidRequestError: no target can serve such a sequence.
        """
        failures = 0  # in a row
        self._sequence.round += 1
        # Both workers take the prompt in at the same time: the first token never waits for the draft.
        self._drafting = asyncio.create_task(self._start())
        try:
            while self._sequence.finish_reason is None:
                try:
                    async with (
                        aclosing(self._fleet.open_target(self._sequence)) as target,
                        aclosing(self._with(target)) as steps,
                    ):
                        async for step in steps:
                            failures = 0
                            yield step
                except WorkerLostError as lost:
                    failures += 1
                    await self._before_retry(failures, lost)
        finally:
            self._drafting.cancel()
            await asyncio.gather(self._drafting, return_exceptions=True)
            if self._drafter is not None:
                await self._drafter.aclose()

    async def _before_retry(self, failures: int, lost: WorkerLostError) -> None:
        """The first attempt to go on elsewhere follows at once, later ones after growing pauses."""
        if failures == 1:
            self.record.lost_targets += 1
            return
        pause_s = min(SHORTEST_RETRY_S * 2**failures, LONGEST_RETRY_S)
        if asyncio.get_running_loop().time() + pause_s > self._deadline:
            raise DeadlineError(f"no target before the request's deadline: {lost}")
        await asyncio.sleep(pause_s)

    async def _with(self, target: TargetStream) -> AsyncGenerator[Step, None]:
        """Rounds while there are Drafts, plain decoding while there are none."""
        while self._sequence.finish_reason is None:
            if self._drafter is not None and self._may_draft:
                stretch = self._speculative(target, self._drafter)
            else:
                stretch = self._plain(target, self._drafter)
            async with aclosing(stretch) as steps:
                async for step in steps:
                    yield step
            self._sequence.round += 1

    async def _speculative(self, target: TargetStream, drafter: Drafter) -> AsyncGenerator[Step, None]:
        """Rounds until the sequence is finished or the drafter fails."""
        draft = NO_DRAFT
        while self._may_draft:
            step = await self._verify(target, draft)
            if step.finish_reason is None:
                # Drafting goes on while this verdict's tokens travel to the client.
                self._sequence.round += 1
                self._drafting = asyncio.create_task(self._draft(drafter, after=self._drafting))
            yield step
            if step.finish_reason is not None:
                return
            draft = await self._drafting

    async def _start(self) -> rounds_pb2.Draft:
        if self._drafter is not None:
            try:
                await self._drafter.start()
            except WorkerLostError:
                self.record.lost_drafts += 1
                self._may_draft = False
        return NO_DRAFT

    async def _draft(self, drafter: Drafter, after: "asyncio.Task[rounds_pb2.Draft]") -> rounds_pb2.Draft:
        assert self._depth is not None
        await after
        if not self._may_draft:
            return NO_DRAFT
        # The verdict adds one token of the target's own, so the last one needs no Draft.
        depth = min(self._depth, self._sequence.limit - len(self._sequence) - 1)
        try:
            draft = await drafter.propose(depth)
            self.record.late_drafts += draft is None
        except WorkerLostError:
            self.record.lost_drafts += 1
            draft = None
        self._may_draft = draft is not None
        return draft or NO_DRAFT

    async def _verify(self, target: TargetStream, draft: rounds_pb2.Draft) -> Step:
        verify = rounds_pb2.Verify(turn=target.turn(), draft=draft)  # the Draft goes on as it came
        await target.send(rounds_pb2.TargetRequest(verify=verify))
        reply = await self._reply(target)
        if draft.tokens:
            self.record.rounds += 1
            self.record.drafted += len(draft.tokens)
            self.record.accepted_lengths[len(reply.accepted)] += 1
            self.record.verified += len(reply.accepted) + _refused(draft, reply)
        return self._commit(reply, Origin.TARGET if draft.tokens else Origin.PLAIN)

    async def _plain(self, target: TargetStream, drafter: Drafter | None) -> AsyncGenerator[Step, None]:
        """Plain decoding until the drafter is back, without a turn per token.

        A client that does not read stops the grants.
        """
        recovery = asyncio.create_task(_never() if drafter is None else drafter.recover())
        until = 0
        try:
            while self._sequence.finish_reason is None and not recovery.done():
                if until - len(self._sequence) <= PLAIN_STRETCH // 2 and until < self._sequence.limit:
                    until = min(len(self._sequence) + PLAIN_STRETCH, self._sequence.limit)
                    plain = rounds_pb2.Plain(turn=target.turn(), until=until)
                    await target.send(rounds_pb2.TargetRequest(plain=plain))
                yield self._commit(await self._reply(target), Origin.PLAIN)
        finally:
            self._may_draft = recovery.done()
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)

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
        self.record.target_passes += 1
        tokens = tuple(map(Token, reply.tokens, origins, logprobs))
        return Step(tokens, self._sequence.finish_reason)


async def _never() -> None:
    await asyncio.Future[None]()


def _refused(draft: rounds_pb2.Draft, reply: rounds_pb2.TargetReply) -> int:
    """1 if the Draft had a guess for the position of the target's own token, and it was wrong."""
    end_of_path = reply.accepted[-1] if reply.accepted else -1
    return int(end_of_path in draft.parents)
