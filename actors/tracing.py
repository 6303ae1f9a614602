"""Spans of a worker: a span for each answer that a gateway's span waits for, with spans of its parts.

A span is recorded from the engine's timings shortly after the answer, so that the answer is not delayed. If
an answer took several steps, their parts are concatenated: ``forward`` and ``sample`` last as long as in all
steps.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from actors.messages import EngineAnswer
from outrider.engine.work import Decoded, Proposed
from protos import rounds_pb2
from protos.trace_context import context_of

TRACER = trace.get_tracer("outrider")

DELAY_S = 0.005  # seconds after an answer; all answers of the step are sent by then


class DelayedSpans:
    """Spans of a gateway's stream, each recorded shortly after its answer."""

    def __init__(self) -> None:
        self._unrecorded: deque[Callable[[], object]] = deque()

    def add(self, record: Callable[..., object], *arguments: object) -> None:
        """Schedules a function call for shortly after the answer, or for the end of the stream."""
        self._unrecorded.append(partial(record, *arguments))
        asyncio.get_running_loop().call_later(DELAY_S, self._record_next)

    def record_all(self) -> None:
        """Records all remaining spans at the end of the stream: this process may end soon."""
        while self._unrecorded:
            self._record_next()

    def _record_next(self) -> None:
        if self._unrecorded:
            self._unrecorded.popleft()()


class SequenceTrace:
    """Spans of one sequence. Turns without a trace context cost nothing."""

    def __init__(self, later: Callable[..., object], *, is_coupled: bool) -> None:
        """
        Args:
            later: schedules a function call for a time when no answer waits.
            is_coupled: whether tokens of plain decoding count even if they are answered after the next turn.
        """
        self._later = later
        self._is_coupled = is_coupled
        self._newest = NO_ROUND
        self._before = NO_ROUND  # previous round, whose plain decoding may still be answered

    def asked(self, turn: rounds_pb2.Turn) -> None:
        """Records a turn. A repeated round brings the span that waits for the answer after the next answer.

        Work of the target under a lease is recorded below the newest of these spans.
        """
        if not turn.traceparent:
            return
        if turn.round > self._newest.number:
            self._later(self._before.record_plain)
            self._before, self._newest = self._newest, _Round(turn.round, turn.traceparent)
            if not self._is_coupled:
                self._later(self._before.record_plain, turn.base + len(turn.tokens))
                self._before = NO_ROUND
        self._newest.parents.append(turn.traceparent)

    def answered(self, answer: EngineAnswer) -> None:
        """Records an answer that is being sent."""
        result, newest = answer.result, self._newest
        if isinstance(result, Decoded) and result.is_plain:
            for asked in (self._before, newest):
                if asked.number == answer.round:
                    asked.plain_answers.append(answer)
            return
        if not newest.parents or newest.number != answer.round:
            return
        if isinstance(result, Proposed):
            self._later(_record, "draft", newest.parents.popleft(), [answer])
        elif isinstance(result, Decoded):
            self._later(_record, "verify", newest.parents[0], [answer])
            if len(newest.parents) > 1 or not result.continues:
                newest.parents.popleft()

    def ended(self) -> None:
        """Ends the current spans at the end of the stream."""
        self._later(self._before.record_plain)
        self._later(self._newest.record_plain)


@dataclass
class _Round:
    """Turns of one round, and its answers of plain decoding."""

    number: int
    traceparent: str  # span of its first turn
    parents: deque[str] = field(default_factory=deque)  # spans that wait for its next answers, in order
    plain_answers: list[EngineAnswer] = field(default_factory=list)

    def record_plain(self, length: int | None = None) -> None:
        """Records the span of plain decoding, if there was any.

        length: tokens of the sequence up to which the gateway used the answers; None: it used all answers.
        """
        taken = [answer for answer in self.plain_answers if length is None or _position(answer) < length]
        if taken:
            _record("plain decoding", self.traceparent, taken, len(self.plain_answers) - len(taken))


NO_ROUND = _Round(0, "")


def _position(answer: EngineAnswer) -> int:
    assert isinstance(answer.result, Decoded)
    return answer.result.length - 1


def _record(name: str, parent: str, answers: list[EngineAnswer], wasted: int = 0) -> None:
    """Records a span from the arrival of the work to its last answer, with child spans of its parts."""
    last = answers[-1]
    timings = [answer.result.timings for answer in answers]
    # Each answer implies a time of arrival, which is too late if it was reported late. The earliest is best.
    totals = accumulate(timing.total for timing in timings)
    started_ns = min(answer.finished_ns - _ns(total) for answer, total in zip(answers, totals, strict=True))
    step = timings[-1].last_step
    span = TRACER.start_span(
        name,
        context_of(parent),
        SpanKind.SERVER,
        attributes={
            "outrider.steps": sum(timing.steps for timing in timings),
            "outrider.batch_size": step.size.sequences,
            "outrider.batch_tokens": step.size.tokens,
            "outrider.free_blocks": last.load.free_blocks,
            "outrider.total_blocks": last.load.total_blocks,
        },
        start_time=started_ns,
    )
    if wasted:
        span.set_attribute("outrider.wasted", wasted)
    queue, forward, sample, steps = (
        sum(getattr(timing, part) for timing in timings) for part in ("queue", "forward", "sample", "step")
    )
    below, packing = trace.set_span_in_context(span), steps - forward - sample
    at_ns = started_ns
    for part, pause, seconds in (("queue", 0, queue), ("forward", packing, forward), ("sample", 0, sample)):
        at_ns += _ns(pause)
        part_span = TRACER.start_span(part, below, start_time=at_ns)
        at_ns += _ns(seconds)
        part_span.end(at_ns)
    preemptions = sum(timing.preemptions for timing in timings)
    if preemptions:
        reason = f"{preemptions} times: the cache is full, older sequences go first"
        span.add_event("preemption", {"outrider.reason": reason}, started_ns)
    span.end(last.finished_ns)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
