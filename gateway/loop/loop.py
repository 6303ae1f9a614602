"""Loop of a sequence: from target to target, and at each target from phase to phase.

Rules:

- Tokens are committed in ``TargetTurns.commit`` only.
- At most one turn per round is unanswered. A turn of the same round replaces its Draft or its lease.
- A lease never shrinks.
- A drafter's ``propose`` may be cancelled at any await.
- ``DraftSource.depth`` is a query.

The loop handles the loss of a target, and ``DraftSource`` the loss of a drafter. docs/architecture.md has the
table of states.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing

from gateway.errors import (
    DeadlineError,
    GenerationFailedError,
    ParkedError,
    SequenceLostError,
    WorkerLostError,
)
from gateway.events import Ended, Events, SequenceFailed, Switched, TargetLost
from gateway.loop.answer_trace import NoTrace
from gateway.loop.draft_source import DraftSource
from gateway.loop.parking import Parking
from gateway.loop.phases import PhaseContext, PlainPhase, PromptPhase, RoundPhase, SequencePhase
from gateway.loop.second_targets import SecondTargets
from gateway.loop.stats import Stats
from gateway.loop.target_turns import Committed, TargetTurns
from gateway.loop.watched_target import MovedError, SecondTarget, WatchedTarget
from gateway.proposal import NO_PROPOSAL
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet, TargetStream
from outrider.learning.backoff import Backoff
from outrider.telemetry.reasons import DepthReason, FailureReason, SpanReason

logger = logging.getLogger(f"ray.serve.{__name__}")

RETRY = Backoff(0.08, 1.0)  # seconds before an attempt to open a target, from the second failure in a row on


class SequenceLoop:
    """Generates one sequence; ``steps`` can be called once."""

    def __init__(
        self,
        sequence: GatewaySequence,
        fleet: Fleet,
        paces: Paces,
        source: DraftSource,
        events: Events,
        stats: Stats,
        trace: NoTrace,
        deadline: float,
        max_losses: int,
        parking: Parking,
        second_targets: SecondTargets,
    ) -> None:
        """
        Args:
            stats, trace: listeners to the events.
            deadline: when to give up, in the event loop's time.
            max_losses: consecutive lost targets, without a token in between, after which it gives up.
            parking: parks the sequence.
            second_targets: decides when the sequence is opened at a second target.
        """
        self._sequence = sequence
        self._fleet = fleet
        self._paces = paces
        self._source = source
        self._events = events
        self.stats = stats
        self._trace = trace
        self._deadline = deadline
        self._max_losses = max_losses
        self._parking = parking
        self._second_targets = second_targets

    def depth(self) -> tuple[int, str]:
        """Returns the depth of the next Draft, 0 for plain decoding, and its reason."""
        return self._source.depth()

    async def steps(self) -> AsyncGenerator[Committed, None]:
        """Yields what each reply of the target adds, once committed. Ends early if the sequence is parked.

        When a target is lost, another target continues from the committed tokens; keyed noise makes it
        generate the same text. The sequence may be the cause of the loss. So it is opened isolated from other
        suspects, and at most max_losses targets are tried. The sequence also moves to a second target if that
        is better; see ``WatchedTarget``.

        Raises:
            DeadlineError: the deadline passed first.
            InvalidRequestError: no target can serve such a sequence.
            GenerationFailedError: a target's engine cannot continue it, or max_losses targets were lost.
        """
        failures = losses = 0  # consecutive: failed attempts, and lost targets that had the sequence
        second: SecondTarget | None = None  # second target, at which the sequence is already open
        self._sequence.round += 1
        try:
            while self._sequence.finish_reason is None:
                try:
                    with (
                        closing(self._opened(second, is_isolated=losses > 0)) as stream,
                        self._parking.at(stream),
                        closing(self._watched(stream)) as watched,
                    ):
                        is_answered, second = second is not None and self._take_over(second), None
                        async with aclosing(self._phases(stream, watched, is_answered=is_answered)) as steps:
                            async for step in steps:
                                failures = losses = 0
                                self._fleet.cleared(stream)
                                yield step
                except MovedError as moved:
                    second = moved.second
                    self._events.emit(Ended(SpanReason.MOVED))
                except ParkedError:
                    self._sequence.draft = None  # another drafter may continue
                    self._events.emit(Ended(SpanReason.PARKED))
                    return
                except WorkerLostError as lost:
                    failures += 1
                    losses += isinstance(lost, SequenceLostError)
                    self._events.emit(Ended(SpanReason.LOST_TARGET))
                    if losses == self._max_losses:
                        raise self._failed(losses, lost) from lost
                    self._events.emit(TargetLost(str(lost), is_first=failures == 1))
                    await self._before_retry(failures, lost)
        except GenerationFailedError as error:
            reason = FailureReason.LOST_TARGETS if losses else FailureReason.ENGINE
            self._events.emit(SequenceFailed(reason))
            logger.error("a request fails: %s", error)
            raise
        finally:
            self._events.emit(Ended(SpanReason.ENDED))
            await self._source.aclose()

    def _failed(self, losses: int, lost: WorkerLostError) -> GenerationFailedError:
        return GenerationFailedError(
            f"{losses} target workers were lost with this request, without a token in between: max_losses="
            f"{self._max_losses} allows no further; the last one: {lost}"
        )

    async def _before_retry(self, failures: int, lost: WorkerLostError) -> None:
        """Waits before a retry: not before the first, then for longer each time. Raises DeadlineError."""
        if failures == 1:
            return
        pause_s = RETRY.after(failures - 2)
        if asyncio.get_running_loop().time() + pause_s > self._deadline:
            raise DeadlineError(f"no target before the request's deadline: {lost}")
        await asyncio.sleep(pause_s)

    def _opened(self, second: SecondTarget | None, *, is_isolated: bool) -> TargetStream:
        if second is not None:
            return second.stream
        return self._fleet.open_target(self._sequence, is_isolated=is_isolated)

    def _watched(self, stream: TargetStream) -> WatchedTarget:
        return WatchedTarget(stream, self._sequence, self._fleet, self._second_targets, self._events)

    def _take_over(self, second: SecondTarget) -> bool:
        """Begins the round in which the second target continues; returns whether it is answered already."""
        self._sequence.round = second.next_round(self._sequence)
        self._sequence.served_by.append(second.stream.address)
        return self._sequence.round == second.round

    async def _phases(
        self, stream: TargetStream, watched: WatchedTarget, *, is_answered: bool
    ) -> AsyncGenerator[Committed, None]:
        """Runs the phases at one target: the prompt if it is scored, then rounds or plain decoding.

        is_answered: whether the target has already sent the next token of plain decoding.
        """
        sequence = self._sequence
        turns = TargetTurns(stream, watched, sequence, self._trace, self._deadline, self._fleet.vocab_size)
        context = PhaseContext(sequence, turns, self._source, self._events, self._trace)
        if sequence.unscored or not sequence.generates:
            async with aclosing(PromptPhase(context).run()) as steps:
                async for step in steps:
                    yield step
        with self._source.at(self._paces.of_target(stream.address)):
            depth, reason = self._source.depth()
            is_round = depth > 0 and not is_answered
            first = RoundPhase(context, NO_PROPOSAL, reason) if is_round else PlainPhase(context, reason)
            phase: SequencePhase | None = first if sequence.finish_reason is None else None
            while phase is not None:
                logger.debug("sequence %d at %s: %s", sequence.number, stream.address, type(phase).__name__)
                async with aclosing(phase.run()) as steps:
                    async for step in steps:
                        yield step
                sequence.round += 1
                phase = phase.next
                if phase is not None and phase.reason != DepthReason.LAST_TOKEN:
                    self._events.emit(
                        Switched("on" if isinstance(phase, RoundPhase) else "off", phase.reason)
                    )
