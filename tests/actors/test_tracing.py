"""The spans of a worker: below the gateway's that wait for its answers, and none where nobody records."""

from typing import Any

import pytest

from actors.messages import EngineAnswer
from actors.tracing import DelayedSpans, SequenceTrace
from outrider.decoding.draft import Verdict
from outrider.engine.work import Decoded, EngineLoad, Timings
from outrider.pace.step import Step, StepSize
from protos import rounds_pb2
from tests.fakes.spans import CLIENT_SPAN_ID, TRACEPARENT
from tests.support.messages import PROMPT, draft_stream, end, opening, plain, target_stream, verify
from tests.support.patience import eventually

PARTS = ["queue", "forward", "sample"]
UNREAD: Any = None  # the sequence of an answer, which traces do not look at


def turn(round: int, base: int, tokens: list[int], traceparent: str = TRACEPARENT) -> rounds_pb2.Turn:
    return rounds_pb2.Turn(round=round, base=base, tokens=tokens, traceparent=traceparent)


async def made(spans, name: str):
    """It is made after the answer."""
    await eventually(lambda: spans.named(name))
    return spans.one(name)


def nest(spans, parent) -> bool:
    below = spans.below(parent)
    inside = all(parent.start_time <= s.start_time <= s.end_time <= parent.end_time for s in below)
    return inside and [span.name for span in below] == PARTS


async def test_verdict_has_a_span_and_its_parts(channel, spans):
    call = await target_stream(channel, opening())
    await call.write(verify(turn(1, 0, PROMPT), 1, 2))
    reply = await call.read()
    await end(call)
    span = await made(spans, "verify")
    assert span.parent.span_id == CLIENT_SPAN_ID
    assert nest(spans, span)
    assert span.end_time - span.start_time == pytest.approx(reply.timings.total_ns, abs=2_000)
    forward = spans.one("forward")
    assert forward.end_time - forward.start_time == pytest.approx(reply.timings.forward_ns, abs=2_000)
    assert span.attributes["outrider.batch_size"] == reply.timings.last_step.sequences == 1
    assert span.attributes["outrider.free_blocks"] == reply.load.free_blocks


async def test_draft_of_several_steps_has_one_span(channel, spans):
    call = await draft_stream(channel, opening())
    propose = rounds_pb2.Propose(turn=turn(1, 0, PROMPT), depth=3)
    await call.write(rounds_pb2.DraftWorkerRequest(propose=propose))
    reply = await call.read()
    call.cancel()
    span = await made(spans, "draft")
    assert nest(spans, span)
    assert span.attributes["outrider.steps"] == len(reply.proposed.draft.tokens) == 3


async def test_plain_decoding_has_one_span_however_often_its_lease_is_extended(channel, spans):
    call = await target_stream(channel, opening())
    await call.write(plain(turn(1, 0, PROMPT), len(PROMPT) + 4))
    await call.write(plain(turn(1, len(PROMPT), []), len(PROMPT) + 12))
    for _ in range(12):
        await call.read()
    await end(call)
    span = await made(spans, "plain decoding")
    assert nest(spans, span)
    assert span.attributes["outrider.steps"] == 12


async def test_sequence_without_a_trace_context_has_no_span(channel, spans):
    call = await target_stream(channel, opening())
    await call.write(verify(turn(1, 0, PROMPT, ""), 1, 2))
    await call.read()
    await call.write(verify(turn(2, 0, PROMPT), 1, 2))
    await call.read()
    await end(call)
    await made(spans, "verify")
    assert len(spans.named("verify")) == 1


def timings(preemptions: int = 0) -> Timings:
    step = Step(1, StepSize(1, 1), 0.003)
    return Timings(0.001, 0.002, 0.0005, 0.003, 0.005, step, steps=1, preemptions=preemptions)


def answer(result, round=1, finished_ns=10**18) -> EngineAnswer:
    return EngineAnswer(round, result, EngineLoad(1, 1, 0, 5, 9), finished_ns)


def plain_token(position: int) -> Decoded:
    return Decoded(UNREAD, 1, Verdict((), (7,)), (), None, timings(), position + 1, is_plain=True)


def generated(position: int) -> EngineAnswer:
    result = plain_token(position)
    return answer(result, finished_ns=10**18 + 10**7 * position)


def at_once(record, *arguments) -> None:
    record(*arguments)


def verified(round: int = 1, preemptions: int = 0) -> EngineAnswer:
    return answer(Decoded(UNREAD, round, Verdict((), (7,)), (), None, timings(preemptions), 4), round)


@pytest.mark.parametrize(
    ("is_coupled", "taken", "wasted"), [(True, 5, None), (False, 2, 2)], ids=["coupled", "rejection"]
)
def test_sequence_trace_plain_tokens_after_the_next_turn_count_if_the_gateway_takes_them(
    spans, is_coupled: bool, taken: int, wasted: int | None
) -> None:
    """Four tokens went out before the turn, which holds two of them. One more goes out after it."""
    trace = SequenceTrace(at_once, is_coupled=is_coupled)
    trace.asked(turn(1, 0, [1, 2, 3]))
    for position in (3, 4, 5, 6):
        trace.answered(generated(position))
    trace.asked(turn(2, 3, [7, 7]))
    trace.answered(generated(7))
    trace.ended()
    span = spans.one("plain decoding")
    assert span.end_time == 10**18 + (2 + taken) * 10**7
    assert span.attributes["outrider.steps"] == taken
    assert span.attributes.get("outrider.wasted") == wasted


def test_sequence_trace_plain_decoding_answered_after_the_next_turn_alone_has_its_span(spans) -> None:
    """The first Draft came before the first token, and the answer ends before its Verdict."""
    trace = SequenceTrace(at_once, is_coupled=True)
    other = TRACEPARENT.replace("b7ad", "aaaa")
    trace.asked(turn(1, 0, [1, 2, 3]))
    trace.asked(turn(2, 3, [], other))
    trace.answered(generated(3))
    trace.ended()
    assert spans.one("plain decoding").parent.span_id == CLIENT_SPAN_ID


async def test_delayed_spans_at_the_end_of_the_stream_are_recorded_at_once() -> None:
    """A worker that is drained ends within the delay."""
    recorded: list[int] = []
    delayed = DelayedSpans()
    delayed.add(recorded.append, 1)
    delayed.add(recorded.append, 2)
    assert recorded == []
    delayed.record_all()
    assert recorded == [1, 2]


async def test_delayed_spans_of_a_stream_that_goes_on_are_recorded_after_the_delay() -> None:
    recorded: list[int] = []
    delayed = DelayedSpans()
    delayed.add(recorded.append, 1)
    delayed.add(recorded.append, 2)
    await eventually(lambda: recorded == [1, 2])


def test_parts_of_a_plain_span_lie_in_it_if_its_first_token_was_late(spans):
    trace = SequenceTrace(at_once, is_coupled=True)
    trace.asked(turn(1, 0, [1, 2, 3]))
    for number, late_ns in enumerate((4 * 10**6, 0)):
        result = plain_token(3 + number)
        trace.answered(answer(result, finished_ns=10**18 + 5 * 10**6 * (number + 1) + late_ns))
    trace.ended()
    span = spans.one("plain decoding")
    assert (span.start_time, span.end_time) == (10**18, 10**18 + 10**7)
    assert nest(spans, span)


def test_verdicts_of_one_round_belong_to_the_spans_that_were_told_one_after_the_other(spans):
    trace = SequenceTrace(at_once, is_coupled=True)
    parents = [TRACEPARENT.replace("b7ad", first) for first in ("aaaa", "bbbb")]
    for parent in parents:
        trace.asked(turn(1, 0, [1], parent))
    for _ in parents:
        trace.answered(verified())
    assert [f"{span.parent.span_id:016x}"[:4] for span in spans.named("verify")] == ["aaaa", "bbbb"]


def test_answers_to_an_older_round_have_no_span(spans):
    trace = SequenceTrace(at_once, is_coupled=True)
    trace.asked(turn(1, 0, [1]))
    trace.asked(turn(2, 1, [2]))
    trace.answered(verified(round=1))
    assert not list(spans)
    trace.answered(verified(round=2))
    assert len(spans.named("verify")) == 1


def test_preemption_is_an_event_with_its_reason(spans):
    trace = SequenceTrace(at_once, is_coupled=True)
    trace.asked(turn(1, 0, [1]))
    trace.answered(verified(preemptions=2))
    (event,) = spans.one("verify").events
    assert event.name == "preemption"
    assert event.attributes["outrider.reason"].startswith("2 times: the cache is full")
