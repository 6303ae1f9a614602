"""Receives the replies of a sequence's target, and opens a second target if that may be better."""

import asyncio
from dataclasses import dataclass
from typing import Any

from gateway.errors import ParkedError, SequenceLostError, WorkerLostError
from gateway.events import Events, SecondEnded, SecondOpened
from gateway.loop.lease import longest_lease
from gateway.loop.second_targets import SecondTargets
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet, TargetStream
from outrider.decoding.lease import Lease
from outrider.telemetry.reasons import MoveReason
from protos import rounds_pb2
from protos.conversions import lease_to_message

CHECKED_EVERY = 32  # replies of a target between two checks of its load against other targets


class MovedError(Exception):
    """Raised when the sequence continues at its second target."""

    def __init__(self, second: "SecondTarget") -> None:
        super().__init__(second.reason)
        self.second = second


@dataclass(frozen=True)
class SecondTarget:
    """Second target of a sequence. It prefills the text, and answers with the next token."""

    stream: TargetStream
    round: int  # round of its turn
    length: int  # length of the sequence in that turn, tokens
    reason: MoveReason
    opened_at: float  # event loop's time

    def next_round(self, sequence: GatewaySequence) -> int:
        """Returns the round in which the sequence continues at this target.

        If the sequence has grown meanwhile, the target's answer is useless, so a later round is begun.
        """
        if len(sequence) == self.length:
            return max(sequence.round + 1, self.round)
        return max(sequence.round, self.round) + 1


class WatchedTarget:
    """Receives replies. While the first target is late, the second target may answer first.

    Both answer with the same token, so it does not matter which answer is taken. A second target that takes
    the sequence over continues from the token after its answer. No second target is opened before the first
    has answered: a sequence that crashes workers would crash both.
    """

    def __init__(
        self,
        stream: TargetStream,
        sequence: GatewaySequence,
        fleet: Fleet,
        second_targets: SecondTargets,
        events: Events,
    ) -> None:
        self._stream = stream
        self._sequence = sequence
        self._fleet = fleet
        self._second_targets = second_targets
        self._events = events
        self._replies = 0
        self._second: SecondTarget | None = None

    async def receive(
        self, round_number: int, timeout_s: float, plain_round: int | None = None
    ) -> rounds_pb2.TargetReply | None:
        """Returns the next reply, as ``WorkerStream.receive`` does.

        Raises:
            MovedError: the sequence continues at its second target.
            GatewayError: the first target's stream ended, and no second target can continue.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        if self._second is None and (reason := self._why_move()) is not None:
            self._open(reason)
        reply, left_s = None, timeout_s
        while True:
            if self._second is not None:
                reply = await self._receive_from_either(round_number, left_s, plain_round)
            else:
                patience_s = left_s
                if self._may_move:
                    patience_s = min(self._second_targets.patience_s(self._stream.link), left_s)
                reply = await self._stream.receive(round_number, patience_s, plain_round)
                if reply is None and patience_s < left_s:
                    self._open(MoveReason.LATE, clock() - started)  # tried again later if it fails
            if reply is not None or left_s == 0:
                break
            left_s = max(timeout_s - (clock() - started), 0.0)
        if reply is not None:
            self._received(reply, clock() - started)
        return reply

    def close(self) -> None:
        """Closes a second target that has not taken the sequence over."""
        if self._second is not None:
            self._end_second(takes_over=False).stream.close()

    def _received(self, reply: rounds_pb2.TargetReply, waited_s: float) -> None:
        self._replies += 1
        if self._replies > 1:  # the wait for the first reply includes the prefill
            self._second_targets.observe(self._stream.link, reply, waited_s)
        if self._second is not None and self._second.reason is MoveReason.LATE:
            self.close()  # the first target was faster after all

    def _why_move(self) -> MoveReason | None:
        """Returns why the sequence should move; None: it should stay. Balance is checked now and then."""
        link = self._stream.link
        if self._may_move and (link.is_leaving or self._replies % CHECKED_EVERY == 0):
            return self._second_targets.why_move(self._sequence, link)
        return None

    @property
    def _may_move(self) -> bool:
        """Whether the first target has answered, and another target would generate the same text."""
        return bool(self._replies) and self._sequence.is_coupled and not self._sequence.unscored

    def _open(self, reason: MoveReason, waited_s: float = 0.0) -> None:
        """Opens the sequence at a second target, if a suitable target exists."""
        sequence, now = self._sequence, asyncio.get_running_loop().time()
        link = self._second_targets.choose(sequence, self._stream.link, reason, waited_s)
        if link is None:
            return
        stream = self._fleet.open_second(sequence, link)
        second = SecondTarget(stream, sequence.round + 1, len(sequence), reason, now)
        # A second target replaces a late target at once. In a move, it takes over after one token.
        lease = longest_lease(sequence) if reason is MoveReason.LATE else Lease(until=len(sequence) + 1)
        decode = rounds_pb2.Decode(turn=stream.turn(second.round), lease=lease_to_message(lease))
        try:
            stream.send(rounds_pb2.TargetWorkerRequest(decode=decode))
        except WorkerLostError:
            stream.close()
            return
        self._second = second
        self._second_targets.began()
        self._events.emit(SecondOpened(reason))

    def _end_second(self, *, takes_over: bool) -> SecondTarget:
        second, self._second = self._second, None
        assert second is not None
        seconds = asyncio.get_running_loop().time() - second.opened_at
        answer = second.stream.arrived(second.round)
        if answer is None:
            self._second_targets.ended(seconds, None)
        else:
            is_late = second.reason is MoveReason.LATE  # the answer to a move may have waited for the client
            self._second_targets.ended(answer.timings.step_ns / 1e9, seconds if is_late else None)
        self._events.emit(SecondEnded(second.reason, seconds, takes_over))
        return second

    async def _receive_from_either(
        self, round_number: int, timeout_s: float, plain_round: int | None
    ) -> rounds_pb2.TargetReply | None:
        """Returns the first target's reply; None after the timeout, or if the second target is lost.

        Raises MovedError if the second target answers first.
        """
        first = asyncio.ensure_future(self._stream.receive(round_number, timeout_s, plain_round))
        try:
            assert self._second is not None
            await self._wait_for_either(first, self._second)
            return first.result() if first.done() else None
        except WorkerLostError as lost:
            # A drained target ends its sequences. The second target, which already prefills the text,
            # continues.
            if self._second is None or isinstance(lost, SequenceLostError | ParkedError):
                raise
            raise MovedError(self._end_second(takes_over=True)) from lost
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _wait_for_either(
        self, first: "asyncio.Future[rounds_pb2.TargetReply | None]", second: SecondTarget
    ) -> None:
        """Waits until the first target answers, or the second target is lost.

        Raises MovedError if the second target answers first.
        """
        other = asyncio.ensure_future(second.stream.answered(second.round))
        try:
            either: list[asyncio.Future[Any]] = [first, other]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                return
            if other.result():
                raise MovedError(self._end_second(takes_over=True))
            self.close()
        finally:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
