"""Spans of an answer's rounds, made from its events."""

from dataclasses import replace

import pytest
from opentelemetry.trace import get_tracer

from gateway.events import (
    AheadDropped,
    Ended,
    PlainBegan,
    RoundBegan,
    Routed,
    SendingAhead,
    TokenDecoded,
    VerdictReceived,
)
from gateway.loop.answer_trace import AnswerTrace
from gateway.proposal import Proposal
from gateway.settings import Speculation
from outrider.decoding.draft import Draft
from outrider.telemetry.reasons import RouteReason
from protos import rounds_pb2
from protos.trace_context import context_of
from tests.fakes.spans import TRACEPARENT

FIXED = Speculation(mode="fixed", depth=4)
DRAFT = Proposal(Draft.chain([1, 2]))


def answer_trace():
    return AnswerTrace(get_tracer("test").start_span("a generation", context_of(TRACEPARENT)), 0, FIXED)


def reply(*tokens, step_ms=4.0, total_ms=5.0):
    timings = rounds_pb2.Timings(step_ns=int(step_ms * 1e6), total_ns=int(total_ms * 1e6))
    return rounds_pb2.TargetReply(tokens=tokens, accepted=range(len(tokens) - 1), timings=timings)


def verdict(proposal, reply, continued=False, target_s=0.005):
    return VerdictReceived(proposal, reply, "fixed", continued, proposal.seconds, target_s)


def traced():
    """Trace of an answer that is in a round, whose target has the next Draft already."""
    trace = answer_trace()
    trace.on(RoundBegan("fixed", waits=True))
    trace.on(SendingAhead(Proposal(Draft((1, 2, 3, 4), (-1, 0, 1, 1)))))
    trace.on(verdict(DRAFT, reply(1, 2, 3)))
    return trace


async def test_trace_continued_round_uses_the_span_sent_ahead(spans):
    trace = traced()
    trace.on(RoundBegan("fixed", continued=True))
    assert trace.current == trace.ahead
    trace.on(verdict(replace(DRAFT, ahead_hit=True), reply(5, 6, 7), continued=True))
    first, second = spans.named("round")
    assert first.start_time < second.start_time < first.end_time < second.end_time
    assert second.attributes["outrider.tree_size"] == 4
    assert second.attributes["outrider.depth"] == 2
    assert second.attributes["outrider.draft_ms"] == 0.0


async def test_trace_routed_new_draft_records_its_share(spans):
    with get_tracer("test").start_as_current_span("a generation", context_of(TRACEPARENT)) as generation:
        trace = AnswerTrace(generation, 0, FIXED)
        trace.on(Routed("next", RouteReason.ROLLED_OUT, 0.125))
        trace.on(Routed("model", RouteReason.WENT_BACK))
    first, second = spans.one("a generation").events
    assert first.attributes == {
        "outrider.drafter": "next",
        "outrider.reason": "rolled out",
        "outrider.share": 0.125,
    }
    assert second.attributes == {"outrider.drafter": "model", "outrider.reason": "went back"}


async def test_trace_round_never_begun_leaves_no_span(spans):
    trace = traced()
    trace.on(RoundBegan("fixed", waits=True))
    trace.on(verdict(DRAFT, reply(5)))
    assert [span.attributes["outrider.tree_size"] for span in spans.named("round")] == [2, 2]


@pytest.mark.parametrize(
    ("end", "named"), [(verdict(DRAFT, reply(2, 3)), "round"), (Ended("fixed"), "abandoned round")]
)
async def test_trace_late_plain_tokens_belong_to_plain_decoding(spans, end, named):
    """They came when the next round had begun. They may end the answer, and the round has no Verdict then."""
    trace = answer_trace()
    trace.on(PlainBegan("first token"))
    trace.on(TokenDecoded(reply(1), 0.0))
    trace.on(Ended("plain"))
    trace.on(RoundBegan("fixed"))
    trace.on(TokenDecoded(reply(1), 0.0))
    trace.on(end)
    plain, round_ = spans.one("plain"), spans.one(named)
    assert plain.attributes["outrider.tokens"] == plain.attributes["outrider.target_passes"] == 2
    assert round_.attributes["outrider.tokens"] == len(getattr(end, "reply", reply()).tokens)
    assert plain.end_time > round_.start_time


async def test_trace_plain_decoding_that_ends_the_answer_has_its_span(spans):
    trace = answer_trace()
    trace.on(PlainBegan("off"))
    trace.on(TokenDecoded(reply(1), 0.0))
    trace.on(Ended("plain"))
    trace.on(Ended("ended"))
    assert spans.one("plain").attributes["outrider.tokens"] == 1


async def test_trace_forgone_round_is_abandoned(spans):
    """The span stays in the trace: the worker has spans below it."""
    trace = traced()
    trace.on(AheadDropped("measured"))
    trace.on(PlainBegan("measured"))
    abandoned = spans.one("abandoned round")
    assert abandoned.attributes["outrider.abandoned"] == "measured"
    assert trace.ahead.split("-")[2] == f"{abandoned.context.span_id:016x}"


@pytest.mark.parametrize(("waits", "expected"), [(True, [6, 3 + 2, 1 + 4, 4]), (False, [0, 3, 1, 4])])
async def test_trace_round_without_a_wait_has_no_draft_time(spans, waits, expected):
    """The Draft: 12 ms, 6 in steps and 2 outside of the worker. The Verdict: 5 ms, 4 in steps, 3 outside."""
    proposal = replace(DRAFT, seconds=0.012, worker_s=0.010, step_s=0.006)
    trace = answer_trace()
    trace.on(RoundBegan("fixed", waits=waits))
    trace.on(verdict(proposal, reply(1, 2, 3), target_s=0.008))
    said = spans.one("round").attributes
    parts = [said[f"outrider.{part}_ms"] for part in ("draft", "wire", "wait", "target")]
    assert parts == pytest.approx(expected)
