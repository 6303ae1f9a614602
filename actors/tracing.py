"""Spans of a worker: a span for each answer that a gateway's span waits for, and parts for its time.

They are made a little after the answer went out, so that it does not wait for them, from the timings that
the engine reports. Where an answer took several steps, their parts are laid end to end: ``forward`` and
``sample`` last as long as they did together.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from actors.messages import EngineAnswer
from outrider.engine.work import Decoded, Proposed
from protos import rounds_pb2
from protos.trace_context import context_of

TRACER = trace.get_tracer("outrider")


class StreamTrace:
    """Spans of one sequence's stream. Turns without a trace context cost nothing."""

    def __init__(self, later: Callable[..., object]) -> None:
        """later: has a function called with its arguments when an answer does not wait for it."""
        self._later = later
        self._round = 0  # round of the newest turn
        self._parents: deque[str] = deque()  # parents of its answers, in their order
        self._stretch: _Stretch | None = None  # plain decoding under way

    def asked(self, turn: rounds_pb2.Turn) -> None:
        """Records a turn. A repeated round brings the span that waits for the answer after the next.

        What the target does by itself after that is told below the newest of them.
        """
        if not turn.traceparent:
            return
        if turn.round > self._round:
            self._end_stretch(turn.base + len(turn.tokens))
            self._round = turn.round
            self._parents.clear()
        self._parents.append(turn.traceparent)

    def answered(self, answer: EngineAnswer) -> None:
        """Records an answer that goes out."""
        if not self._parents or answer.round != self._round:
            return
        if isinstance(answer.result, Decoded) and answer.result.is_plain:
            if self._stretch is None:
                self._stretch = _Stretch(self._parents[0])
            self._stretch.answers.append(answer)
        elif isinstance(answer.result, Proposed):
            self._later(_record, "draft", self._parents.popleft(), [answer])
        elif isinstance(answer.result, Decoded):
            self._later(_record, "verify", self._parents[0], [answer])
            if len(self._parents) > 1 or not answer.result.continues:
                self._parents.popleft()

    def ended(self) -> None:
        """Ends the span under way at the end of the stream."""
        self._end_stretch(None)

    def _end_stretch(self, length: int | None) -> None:
        """length: tokens of the sequence up to which the gateway took answers; None: all of them."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            self._later(stretch.record, length)


@dataclass
class _Stretch:
    parent: str
    answers: list[EngineAnswer] = field(default_factory=list)

    def record(self, length: int | None) -> None:
        """Makes the span, without tokens that came after the gateway went on."""
        taken = [answer for answer in self.answers if length is None or _position(answer) < length]
        if taken:
            _record("plain decoding", self.parent, taken, len(self.answers) - len(taken))


def _position(answer: EngineAnswer) -> int:
    assert isinstance(answer.result, Decoded)
    return answer.result.length - 1


def _record(name: str, parent: str, answers: list[EngineAnswer], wasted: int = 0) -> None:
    """Records a span from the arrival of the work to its last answer, with its parts below it."""
    last = answers[-1]
    timings = [answer.result.timings for answer in answers]
    # From each answer follows when the work came, less how late it was told: the earliest is nearest.
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
