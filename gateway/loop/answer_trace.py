"""Spans of an answer: a span for every round, and for every run of plain decoding.

A round's span begins when its Draft is requested, and ends with its own Verdict. If the target got the Draft
before the previous round was over, the span begins when the Draft was sent. The span of plain decoding ends
with its last token, which may arrive after the next round has begun. The counters of a span are its part of
the answer's Stats, so their sums over an answer equal the usage that the client gets.
"""

import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span
from opentelemetry.util.types import AttributeValue

from gateway.events import (
    AheadDropped,
    Ended,
    Event,
    FellBack,
    PlainBegan,
    Resumed,
    RoundBegan,
    Routed,
    SecondEnded,
    SecondOpened,
    SendingAhead,
    TargetLost,
    TokenDecoded,
    VerdictReceived,
)
from gateway.loop.stats import Stats
from gateway.settings import Speculation
from outrider.telemetry.counters import COUNTERS
from outrider.telemetry.reasons import SpanReason
from protos import rounds_pb2
from protos.trace_context import traceparent_of

TRACER = trace.get_tracer("outrider")

ROUND, PLAIN, ABANDONED = "round", "plain", "abandoned round"


class NoTrace:
    """Trace of an answer that is not recorded: a no-op, and workers get no trace context."""

    request = ""  # traceparent for work that no round waits for
    current = ""  # traceparent of the round or plain decoding under way
    ahead = ""  # traceparent of the round whose Draft is sent before it begins

    def on(self, event: Event) -> None:
        """Records an event."""


NO_TRACE = NoTrace()


class AnswerTrace(NoTrace):
    """Trace of an answer that is recorded."""

    def __init__(self, generation: Span, choice: int, speculation: Speculation) -> None:
        self.request = traceparent_of(generation)
        self._generation = generation
        self._context = trace.set_span_in_context(generation)
        self._shared: dict[str, AttributeValue] = {
            "outrider.choice": choice,
            "outrider.mode": speculation.mode,
            "outrider.drafter": speculation.drafter or "",
            "outrider.verification": speculation.verification,
        }
        self._counted = Stats()  # counted since the previous span ended
        self._span: Span = INVALID_SPAN
        self._next: Span = INVALID_SPAN  # span of the next round; dropped unless the target continues with it
        self._started_ns = 0
        self._waits = self._continued = False
        self._plain: _PlainTimes | None = None  # None: a round is under way
        self._late: _LatePlain | None = None  # earlier plain decoding whose tokens may still arrive

    def on(self, event: Event) -> None:
        if self._late is not None and isinstance(event, TokenDecoded):
            self._late.add(event)
            return
        if isinstance(event, PlainBegan | VerdictReceived | Ended):
            self._finish_late()
        self._counted.on(event)
        match event:
            case RoundBegan():
                has_started = event.continued and self._next is not INVALID_SPAN
                self._enter(ROUND, self._next if has_started else None, event.reason)
                self._span.set_attribute("outrider.waited", event.waits)
                self._waits, self._continued, self._plain = event.waits, event.continued, None
            case PlainBegan():
                self._enter(PLAIN, None, event.reason)
                self._plain = _PlainTimes()
            case SendingAhead():
                self._next = self._started(ROUND, time.time_ns())
                self._next.set_attribute("outrider.tree_size", len(event.proposal.draft))
                self.ahead = traceparent_of(self._next)
            case AheadDropped():
                _abandon(self._next, event.reason)
                self._next.end()
            case VerdictReceived():
                self._verdict(event)
            case TokenDecoded() if self._plain is not None:
                self._plain.add(event.reply)
            case Ended():
                self._end(event.reason)
                if event.reason == SpanReason.PARKED:
                    self._add_event("parked", "an interactive request needed its permit")
            case FellBack():
                self._add_event("fallback", f"{event.reason}: {event.detail}")
            case Resumed():
                self._add_event("rounds", event.reason)
            case Routed():
                routed: dict[str, AttributeValue] = {
                    "outrider.drafter": event.drafter,
                    "outrider.reason": event.reason,
                }
                if event.share is not None:
                    routed["outrider.share"] = event.share
                self._generation.add_event("drafter", routed)
            case TargetLost():
                self._add_event("reopening", event.detail)
            case SecondOpened():
                self._add_event("second target", event.reason)
            case SecondEnded() if event.takes_over:
                self._add_event("moved", event.reason)

    def _enter(self, name: str, started: Span | None, reason: str) -> None:
        """Begins the span of a round or of plain decoding.

        started: the span, if it was started before.
        """
        self._started_ns = time.time_ns()  # read once: the parts of a span must sum up to its length
        self._span = self._started(name, self._started_ns) if started is None else started
        self._next = INVALID_SPAN
        self._span.set_attribute("outrider.reason", reason)
        self.current = traceparent_of(self._span)

    def _verdict(self, verdict: VerdictReceived) -> None:
        ended_ns, proposal = time.time_ns(), verdict.proposal
        if proposal.draft:
            self._span.set_attribute("outrider.depth", proposal.draft.chain_length)
            self._span.set_attribute("outrider.drafted_by", proposal.drafter)
            self._span.set_attribute("outrider.because", proposal.because)
            if not self._continued:
                self._span.set_attribute("outrider.tree_size", len(proposal.draft))
            if proposal.ahead_hit is not None:
                self._span.set_attribute("outrider.ahead_hit", proposal.ahead_hit)
            if proposal.ahead is not None and proposal.ahead.rank is not None:
                self._span.set_attribute("outrider.ahead_hit_rank", proposal.ahead.rank)
        else:
            self._span.update_name(PLAIN)  # plain decoding of one token
        tokens, times = len(verdict.reply.tokens), self._round_times(verdict, self._lasted_ms(ended_ns))
        _finish(*self._leave(), tokens, times, verdict.reply, ended_ns)

    def _end(self, reason: str) -> None:
        """Ends the span of plain decoding, or of a round without a Verdict."""
        if not self._span.is_recording():
            return
        ended_ns, plain = time.time_ns(), self._plain
        lasted = self._lasted_ms(ended_ns)
        if plain is None:
            _abandon(self._span, reason)
            _finish(*self._leave(), 0, Times(wait=lasted), None, ended_ns)
        else:
            wire = max(lasted - plain.total, 0.0)
            times = Times(target=plain.steps, wait=plain.total - plain.steps, wire=wire)
            self._late = _LatePlain(*self._leave(), plain, times, ended_ns)

    def _leave(self) -> tuple[Span, Stats]:
        """Returns the current span and what was counted for it; afterwards there is no current span."""
        left = self._span, self._counted
        self._span, self._counted, self.current = INVALID_SPAN, Stats(), ""
        return left

    def _finish_late(self) -> None:
        """Ends the span of earlier plain decoding: all of its tokens have arrived."""
        if (late := self._late) is not None:
            _finish(late.span, late.counted, late.plain.tokens, late.times, late.plain.newest, late.ended_ns)
            self._late = None

    def _add_event(self, name: str, reason: str) -> None:
        self._generation.add_event(name, {"outrider.reason": reason})

    def _started(self, name: str, started_ns: int) -> Span:
        return TRACER.start_span(name, self._context, attributes=self._shared, start_time=started_ns)

    def _lasted_ms(self, ended_ns: int) -> float:
        return (ended_ns - self._started_ns) / 1e6

    def _round_times(self, verdict: VerdictReceived, lasted: float) -> "Times":
        """Returns the parts of the ``lasted`` milliseconds since the round began.

        If the target continued by itself, the round begins with the previous Verdict here.
        """
        proposal, reply = verdict.proposal, verdict.reply
        step, total = reply.timings.step_ns / 1e6, reply.timings.total_ns / 1e6
        if self._continued:
            target = min(step, lasted)
            return Times(
                target=target, wait=max(min(total, lasted) - target, 0.0), wire=max(lasted - total, 0.0)
            )
        times = Times(target=step, wait=total - step, wire=1e3 * verdict.overhead_s)
        if self._waits:
            waited, outside = 1e3 * proposal.seconds, 1e3 * proposal.overhead_s
            times.draft = proposal.step_s * 1e3
            times.wait += waited - outside - times.draft
            times.wire += outside
        times.gateway = max(lasted - times.target - times.wait - times.wire - times.draft, 0.0)
        return times


@dataclass
class Times:
    """Milliseconds of the parts of a round or of plain decoding, from its beginning to its end."""

    gateway: float = 0.0
    wire: float = 0.0  # network, with the event loops at both ends
    draft: float = 0.0  # steps of the draft
    wait: float = 0.0  # until a step begins, or for a Draft that never came
    target: float = 0.0  # steps of the target


class _PlainTimes:
    """Sums over the replies of plain decoding."""

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = self.total = 0.0  # milliseconds
        self.newest: rounds_pb2.TargetReply | None = None

    def add(self, reply: rounds_pb2.TargetReply) -> None:
        self.tokens += len(reply.tokens)
        self.steps += reply.timings.step_ns / 1e6
        self.total += reply.timings.total_ns / 1e6
        self.newest = reply


@dataclass
class _LatePlain:
    """Plain decoding that has ended, but whose last tokens may arrive until the next round's Verdict."""

    span: Span
    counted: Stats
    plain: _PlainTimes
    times: Times  # parts of the time until the next round began; later time belongs to that round
    ended_ns: int  # end of the span, as read from time.time_ns

    def add(self, event: TokenDecoded) -> None:
        self.counted.on(event)
        self.plain.add(event.reply)
        self.ended_ns = time.time_ns()


def _finish(
    span: Span,
    counted: Stats,
    tokens: int,
    times: Times,
    reply: rounds_pb2.TargetReply | None,
    ended_ns: int,
) -> None:
    attributes: dict[str, AttributeValue] = {"outrider.tokens": tokens}
    for part, milliseconds in vars(times).items():
        attributes[f"outrider.{part}_ms"] = round(milliseconds, 3)
    for counter in COUNTERS:
        if counter.is_in_spans:
            attributes[f"outrider.{counter.name}"] = getattr(counted, counter.name)
    if reply is not None:
        attributes["outrider.batch_size"] = reply.timings.last_step.sequences
        attributes["outrider.batch_tokens"] = reply.timings.last_step.tokens
        attributes["outrider.free_blocks"] = reply.load.free_blocks
    span.set_attributes(attributes)
    span.end(ended_ns)


def _abandon(span: Span, reason: str) -> None:
    span.update_name(ABANDONED)
    span.set_attribute("outrider.abandoned", reason)
