"""The draft-then-verify loop of one sequence. The loss of a worker is handled here and only here."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from gateway.drafters import DRAFTERS, NO_DRAFT, Drafter
from gateway.errors import WorkerLostError
from gateway.fleet import Fleet, TargetStream
from gateway.sequence import Sequence
from gateway.settings import GatewaySettings, Speculation
from protos import rounds_pb2

PLAIN_STRETCH = 64  # tokens granted at a time in plain mode; half of them used up asks for more


@dataclass
class Record:
    """What speculation did for one sequence."""

    rounds: int = 0  # verdicts on a Draft that was not empty
    drafted: int = 0  # tokens
    verified: int = 0  # drafted tokens whose position was reached
    accepted: int = 0  # drafted tokens that stand
    target_passes: int = 0  # verdicts, with a Draft or without
    late_drafts: int = 0  # rounds that went without, because the Draft missed its deadline
    draft_lost: bool = False


class Rounds:
    """Generates one sequence; ``replies`` can be run once."""

    def __init__(
        self, sequence: Sequence, fleet: Fleet, speculation: Speculation, settings: GatewaySettings
    ) -> None:
        self._sequence = sequence
        self._fleet = fleet
        self._speculation = speculation
        self._settings = settings
        self.record = Record()

    async def replies(self) -> AsyncGenerator[rounds_pb2.TargetReply, None]:
        """Each Verdict once its tokens are committed; the last one has a finish_reason.

        Raises WorkerLostError if the target is lost. Losing the draft only ends drafting.
        """
        async with AsyncExitStack() as streams:
            target = await streams.enter_async_context(self._fleet.open_target(self._sequence))
            drafter = await self._open_drafter(streams)
            if drafter is not None:
                async with aclosing(self._speculative(target, drafter)) as replies:
                    async for reply in replies:
                        yield reply
            if self._sequence.finish_reason is None:
                async with aclosing(self._plain(target)) as replies:
                    async for reply in replies:
                        yield reply

    async def _open_drafter(self, streams: AsyncExitStack) -> Drafter | None:
        if self._speculation.mode == "off" or self._speculation.drafter is None:
            return None
        opening = DRAFTERS[self._speculation.drafter](self._fleet, self._sequence, self._settings)
        try:
            return await streams.enter_async_context(opening)
        except WorkerLostError:
            self.record.draft_lost = True
            return None

    async def _speculative(
        self, target: TargetStream, drafter: Drafter
    ) -> AsyncGenerator[rounds_pb2.TargetReply, None]:
        """Rounds until the sequence is finished or the drafter is lost."""
        # Both take the prompt in at the same time: the first token never waits for the draft.
        self._sequence.round += 1
        drafting = asyncio.create_task(self._draft(drafter, 0, after=None))
        draft = NO_DRAFT
        try:
            while True:
                reply = await self._verify(target, draft)
                if self._sequence.finish_reason is not None:
                    yield reply
                    return
                # Drafting goes on while this verdict's tokens travel to the client.
                self._sequence.round += 1
                drafting = asyncio.create_task(self._draft(drafter, self._depth(), after=drafting))
                yield reply
                draft = await drafting
                if self.record.draft_lost:
                    return
        finally:
            drafting.cancel()
            await asyncio.gather(drafting, return_exceptions=True)

    def _depth(self) -> int:
        """The verdict adds one token of the target's own, so the last one needs no Draft."""
        assert self._speculation.depth is not None
        return min(self._speculation.depth, self._sequence.limit - len(self._sequence) - 1)

    async def _draft(
        self, drafter: Drafter, depth: int, after: "asyncio.Task[rounds_pb2.Draft] | None"
    ) -> rounds_pb2.Draft:
        if after is not None:
            await after
        try:
            draft = await drafter.propose(self._sequence, depth)
        except WorkerLostError:
            self.record.draft_lost = True
            return NO_DRAFT
        if draft is None:
            self.record.late_drafts += 1
            return NO_DRAFT
        return draft

    async def _verify(self, target: TargetStream, draft: rounds_pb2.Draft) -> rounds_pb2.TargetReply:
        verify = rounds_pb2.Verify(turn=target.turn(), draft=draft)  # the Draft goes on as it came
        await target.send(rounds_pb2.TargetRequest(verify=verify))
        reply = await target.receive(self._sequence.round)
        assert reply is not None
        self._commit(reply)
        if draft.tokens:
            self.record.rounds += 1
            self.record.drafted += len(draft.tokens)
            self.record.accepted += len(reply.accepted)
            self.record.verified += len(reply.accepted) + _refused(draft, reply)
        return reply

    async def _plain(self, target: TargetStream) -> AsyncGenerator[rounds_pb2.TargetReply, None]:
        """Plain decoding to the end, without a turn per token. A slow client stops the grants."""
        self._sequence.round += 1
        until = 0
        while self._sequence.finish_reason is None:
            if until - len(self._sequence) <= PLAIN_STRETCH // 2 and until < self._sequence.limit:
                until = min(len(self._sequence) + PLAIN_STRETCH, self._sequence.limit)
                plain = rounds_pb2.Plain(turn=target.turn(), until=until)
                await target.send(rounds_pb2.TargetRequest(plain=plain))
            reply = await target.receive(self._sequence.round)
            assert reply is not None
            self._commit(reply)
            yield reply

    def _commit(self, reply: rounds_pb2.TargetReply) -> None:
        self._sequence.generated.extend(reply.tokens)
        self._sequence.finish_reason = reply.finish_reason or None
        self.record.target_passes += 1


def _refused(draft: rounds_pb2.Draft, reply: rounds_pb2.TargetReply) -> int:
    """1 if the Draft had a guess for the position of the target's own token, and it was wrong."""
    end_of_path = reply.accepted[-1] if reply.accepted else -1
    return int(end_of_path in draft.parents)
