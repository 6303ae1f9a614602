"""The spans of one answer: one for every round and for every stretch of plain decoding.

A round's span begins when its Draft is asked for, and ends with its own Verdict. Where the target held the
Draft before it had finished the round before, the span begins when the Draft was sent there. Its attributes
count what the answer's Stats gained meanwhile, so over an answer they sum up to the usage that the client is
told.
"""

import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span
from opentelemetry.util.types import AttributeValue

from gateway.observe.stats import Stats
from gateway.rounds.proposal import Proposal
from gateway.settings import Speculation
from protos import rounds_pb2
from protos.conversions import chain_depth
from protos.trace_context import traceparent_of

TRACER = trace.get_tracer("outrider")

ROUND, PLAIN, ABANDONED = "round", "plain", "abandoned round"
COUNTED = (
    "drafted", "verified", "accepted", "prepared_for", "continued", "saved_ms", "wasted", "target_passes",
    "late_drafts", "lost_drafts", "empty_drafts",
)  # fmt: skip


class NoTrace:
    """Of an answer that is not recorded: nothing is computed, and nothing crosses to the workers."""

    request = ""  # traceparent for work that no round waits for
    current = ""  # traceparent of the round or stretch under way

    def begin(self, reason: str, *, waits: bool = False, continued: bool = False) -> None:
        """A round begins.

        Args:
            reason: what decided the depth of its Draft.
            waits: it begins with waiting for its Draft.
            continued: the target has its Draft already.
        """

    def begin_stretch(self, reason: str) -> None:
        """Plain decoding begins, for that reason."""

    def ahead(self, prepared: Proposal) -> str:
        """The target is about to be sent the next round's Draft; the traceparent of that round."""
        return ""

    def forgo(self, reason: str) -> None:
        """The target has gone on, and for that reason nobody wants to know."""

    def verdict(
        self, proposal: Proposal, reply: rounds_pb2.TargetReply, overhead_s: float, emitted: int
    ) -> None:
        """The round is over.

        Args:
            overhead_s: from Verify to Verdict, outside of the target worker.
            emitted: tokens.
        """

    def plain_token(self, reply: rounds_pb2.TargetReply) -> None:
        """The stretch has one more."""

    def end(self, reason: str) -> None:
        """Ends a stretch, or a round that for that reason will have no Verdict."""

    def event(self, name: str, reason: str) -> None:
        """Something happened to the answer."""


NO_TRACE = NoTrace()


class AnswerTrace(NoTrace):
    """Of an answer that is recorded. At most one round or stretch is under way."""

    def __init__(self, generation: Span, choice: int, speculation: Speculation, stats: Stats) -> None:
        self.request = traceparent_of(generation)
        self._generation = generation
        self._context = trace.set_span_in_context(generation)
        self._shared: dict[str, AttributeValue] = {
            "outrider.choice": choice,
            "outrider.mode": speculation.mode,
            "outrider.drafter": speculation.drafter or "",
            "outrider.verification": speculation.verification,
        }
        self._stats = stats
        self._before = _counts(stats)
        self._span: Span = INVALID_SPAN
        self._ahead: Span = INVALID_SPAN  # of the next round; dropped unless the target goes on with it
        self._begun = 0.0
        self._waits = self._continued = False
        self._stretch: _Stretch | None = None  # None: a round is under way

    def begin(self, reason: str, *, waits: bool = False, continued: bool = False) -> None:
        self._enter(self._ahead if continued else self._started(ROUND), reason)
        self._span.set_attribute("outrider.waited", waits)
        self._waits, self._continued, self._stretch = waits, continued, None

    def begin_stretch(self, reason: str) -> None:
        self._enter(self._started(PLAIN), reason)
        self._stretch = _Stretch()

    def _enter(self, span: Span, reason: str) -> None:
        self._span, self._ahead = span, INVALID_SPAN
        span.set_attribute("outrider.reason", reason)
        self._begun = time.perf_counter()
        self.current = traceparent_of(span)

    def ahead(self, prepared: Proposal) -> str:
        self._ahead = self._started(ROUND)
        self._ahead.set_attribute("outrider.tree_size", len(prepared.draft.tokens))
        return traceparent_of(self._ahead)

    def forgo(self, reason: str) -> None:
        _abandon(self._ahead, reason)
        self._ahead.end()

    def verdict(
        self, proposal: Proposal, reply: rounds_pb2.TargetReply, overhead_s: float, emitted: int
    ) -> None:
        nodes = len(proposal.draft.tokens)
        if nodes:
            self._span.set_attribute("outrider.depth", chain_depth(proposal.draft))
            if not self._continued:
                self._span.set_attribute("outrider.tree_size", nodes)
            if proposal.ahead_hit is not None:
                self._span.set_attribute("outrider.ahead_hit", proposal.ahead_hit)
            if proposal.rank is not None:
                self._span.set_attribute("outrider.foreseen_rank", proposal.rank)
        else:
            self._span.update_name(PLAIN)  # a stretch of one token
        self._finish(emitted, self._round_times(proposal, reply, overhead_s), reply)

    def plain_token(self, reply: rounds_pb2.TargetReply) -> None:
        assert self._stretch is not None
        self._stretch.add(reply)

    def end(self, reason: str) -> None:
        if not self._span.is_recording():
            return
        if self._stretch is None:
            _abandon(self._span, reason)
            self._finish(0, Times(wait=self._lasted_ms()), None)
        else:
            stretch = self._stretch
            wire = max(self._lasted_ms() - stretch.total, 0.0)
            times = Times(target=stretch.steps, wait=stretch.total - stretch.steps, wire=wire)
            self._finish(stretch.tokens, times, stretch.newest)

    def event(self, name: str, reason: str) -> None:
        self._generation.add_event(name, {"outrider.reason": reason})

    def _started(self, name: str) -> Span:
        return TRACER.start_span(name, self._context, attributes=self._shared)

    def _lasted_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._begun)

    def _round_times(self, proposal: Proposal, reply: rounds_pb2.TargetReply, overhead_s: float) -> "Times":
        """They sum up to the time since the round, or the Verdict before it, was begun with."""
        lasted = self._lasted_ms()
        step, total = reply.timings.step_ns / 1e6, reply.timings.total_ns / 1e6
        if self._continued:
            target = min(step, lasted)
            return Times(
                target=target, wait=max(min(total, lasted) - target, 0.0), wire=max(lasted - total, 0.0)
            )
        times = Times(target=step, wait=total - step, wire=1e3 * overhead_s)
        if self._waits:
            waited, outside = 1e3 * proposal.seconds, 1e3 * proposal.overhead_s
            times.draft = proposal.step_s * 1e3
            times.wait += waited - outside - times.draft
            times.wire += outside
        times.gateway = max(lasted - times.target - times.wait - times.wire - times.draft, 0.0)
        return times

    def _finish(self, emitted: int, times: "Times", reply: rounds_pb2.TargetReply | None) -> None:
        attributes: dict[str, AttributeValue] = {"outrider.tokens": emitted}
        for part, milliseconds in vars(times).items():
            attributes[f"outrider.{part}_ms"] = round(milliseconds, 3)
        counts = _counts(self._stats)
        for count in COUNTED:
            attributes[f"outrider.{count}"] = counts[count] - self._before[count]
        self._before = counts
        if reply is not None:
            attributes["outrider.batch_size"] = reply.timings.last_step.sequences
            attributes["outrider.batch_tokens"] = reply.timings.last_step.tokens
            attributes["outrider.free_blocks"] = reply.load.free_blocks
        self._span.set_attributes(attributes)
        self._span.end()
        self._span, self.current = INVALID_SPAN, ""


@dataclass
class Times:
    """Milliseconds of a round or a stretch; together they are as long as it."""

    gateway: float = 0.0
    wire: float = 0.0  # and the event loops at its ends
    draft: float = 0.0  # steps of the draft
    wait: float = 0.0  # for a step to begin, or for a Draft that never came
    target: float = 0.0  # steps of the target


class _Stretch:
    """What the replies of a stretch say together."""

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = self.total = 0.0  # milliseconds
        self.newest: rounds_pb2.TargetReply | None = None

    def add(self, reply: rounds_pb2.TargetReply) -> None:
        self.tokens += 1
        self.steps += reply.timings.step_ns / 1e6
        self.total += reply.timings.total_ns / 1e6
        self.newest = reply


def _abandon(span: Span, reason: str) -> None:
    span.update_name(ABANDONED)
    span.set_attribute("outrider.abandoned", reason)


def _counts(stats: Stats) -> dict[str, float]:
    counts = {name: getattr(stats, name) for name in COUNTED if name != "saved_ms"}
    return counts | {"saved_ms": 1e3 * stats.saved_s}
