"""Trace of a request: its spans, and no spans if it is not sampled."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest
from opentelemetry.context import attach, detach
from opentelemetry.trace import StatusCode

from gateway.errors import DeadlineError
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.loop import drafter_health
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from outrider.learning.backoff import Backoff
from protos.trace_context import context_of
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.fakes.spans import CLIENT_SPAN_ID, NOT_SAMPLED, TRACE_ID, TRACEPARENT

TEXT = "A text that is written down beforehand, of 64 tokens all in all."
ANSWER = list(TEXT.encode())
SETTINGS = GatewaySettings(model="m", tokenizer="unused")
FIXED = Speculation(mode="fixed", depth=4)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(drafter_health, "RECOVERY", Backoff(0.001, 30.0))


async def asked(fleet, tokenizer, speculation=FIXED, traceparent=TRACEPARENT, n=1, **settings):
    """The chunks of the answer to a request."""
    generation = Generation(SETTINGS.model_copy(update=settings), tokenizer, fleet)
    token = attach(context_of(traceparent))
    try:
        sampling = Sampling(max_tokens=len(ANSWER), seed=2**63 + 1)
        prepared = await generation.prepare(Request(("a prompt",), sampling, speculation=speculation, n=n))
    finally:
        detach(token)
    return aclosing(generation.chunks(prepared))


async def answer(*arguments, **settings):
    """The usage."""
    async with await asked(*arguments, **settings) as chunks:
        return [chunk async for chunk in chunks][-1].usage


def counted(spans, usage):
    """Sums over the spans of rounds and plain decoding, and the usage that the client gets."""
    stats = usage.stats
    reported = {
        "tokens": usage.completion_tokens,
        "target_passes": stats.target_passes,
        "drafted": stats.drafted,
        "reached": stats.reached,
        "accepted": stats.accepted,
        "late_drafts": stats.late_drafts,
        "lost_drafts": stats.lost_drafts,
    }
    rounds = [span for span in spans if not span.name.startswith("text_completion")]
    summed = {name: sum(span.attributes[f"outrider.{name}"] for span in rounds) for name in reported}
    return summed, reported


@pytest.mark.parametrize(
    "speculation",
    [FIXED, Speculation(mode="off"), Speculation(drafter="ngram"), Speculation()],
    ids=["fixed", "plain", "ngram", "auto"],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_spans_of_rounds_sum_up_to_the_usage(tokenizer, spans, speculation, n):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3, 11, 24])) as fleet:
        usage = await answer(fleet, tokenizer, speculation, n=n)
    summed, reported = counted(spans, usage)
    assert summed == reported
    assert len(spans.named("round")) == usage.stats.rounds
    assert {span.attributes["outrider.choice"] for span in spans.named("round") + spans.named("plain")} == {
        *range(n)
    }


async def test_span_of_a_round_has_its_counts_and_reason(tokenizer, spans):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3])) as fleet:
        await answer(fleet, tokenizer)
    first_token, first, second = list(spans)[1:4]
    assert (first_token.name, first_token.attributes["outrider.reason"]) == ("plain", "first token")
    assert (first.name, second.name) == ("round", "round")
    names = (
        "depth",
        "tree_size",
        "drafted",
        "accepted",
        "tokens",
        "mode",
        "reason",
        "verification",
        "drafter",
    )
    assert [first.attributes[f"outrider.{name}"] for name in names] == [
        4, 4, 4, 2, 3, "fixed", "fixed", "coupled", "model",
    ]  # fmt: skip
    parts = ("gateway", "wire", "draft", "wait", "target")
    lasted_ms = (second.end_time - second.start_time) / 1e6
    assert sum(second.attributes[f"outrider.{part}_ms"] for part in parts) == pytest.approx(
        lasted_ms, abs=0.01
    )
    assert "outrider.batch_size" in second.attributes


async def test_span_of_a_generation_has_request_and_answer(tokenizer, spans):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        usage = await answer(fleet, tokenizer)
    generation = spans.one("text_completion m")
    assert generation.context.trace_id == TRACE_ID
    assert generation.parent.span_id == CLIENT_SPAN_ID
    reported = {name: generation.attributes[f"gen_ai.{name}"] for name in (
        "operation.name", "request.model", "request.max_tokens", "request.temperature",
        "usage.input_tokens", "usage.output_tokens", "response.finish_reasons",
    )}  # fmt: skip
    assert reported == {
        "operation.name": "text_completion",
        "request.model": "m",
        "request.max_tokens": 64,
        "request.temperature": 1.0,
        "usage.input_tokens": usage.prompt_tokens,
        "usage.output_tokens": usage.completion_tokens,
        "response.finish_reasons": ("length",),
    }
    assert generation.attributes["gen_ai.request.seed"] == str(2**63 + 1)  # too large for an integer there
    lasted_s = (generation.end_time - generation.start_time) / 1e9
    assert 0 < generation.attributes["gen_ai.response.time_to_first_chunk"] < lasted_s
    assert set(spans.below(generation)) == set(spans) - {generation}


@pytest.mark.parametrize("switched_on", [False, True])
async def test_span_has_texts_only_if_the_setting_asks_for_them(tokenizer, spans, switched_on):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        await answer(fleet, tokenizer, trace_texts=switched_on)
    everything = "".join(span.to_json() for span in spans)
    assert ("a prompt" in everything) is switched_on
    assert (TEXT in everything) is switched_on
    if switched_on:
        (said,) = json.loads(spans.one("text_completion m").attributes["gen_ai.output.messages"])
        assert said == {"role": "assistant", "parts": [{"type": "text", "content": TEXT}]}


@pytest.mark.parametrize(("read", "reported"), [(1, ["cancelled"]), (len(ANSWER), [])], ids=["early", "late"])
async def test_span_is_cancelled_only_if_the_reader_leaves_before_the_end(tokenizer, spans, read, reported):
    async with (
        fleet_of(ScriptedTarget(ANSWER)) as fleet,
        await asked(fleet, tokenizer, Speculation(mode="off")) as chunks,
    ):
        for _ in range(read):
            await anext(chunks)
    assert [event.name for event in spans.one("text_completion m").events] == reported


@pytest.mark.parametrize("traceparent", ["", NOT_SAMPLED])
async def test_trace_that_is_not_sampled_makes_no_spans_and_sends_no_context(tokenizer, spans, traceparent):
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, tokenizer, traceparent=traceparent)
    assert not list(spans)
    assert not any(turn.traceparent for turn in turns(target, draft))


def turns(*workers):
    requests = [request for worker in workers for request in worker.requests]
    kinds = [(request, request.WhichOneof("request")) for request in requests]
    return [getattr(request, kind).turn for request, kind in kinds if kind not in ("open", "close")]


async def test_turn_carries_the_span_that_waits_for_it(tokenizer, spans):
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[9])
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, tokenizer)
    waiting = [f"{span.context.span_id:016x}" for span in (*spans.named("plain"), *spans.named("round"))]
    reported = [turn.traceparent.split("-")[2] for turn in turns(target)]
    assert sorted(reported) == sorted(waiting)
    asked = {turn.traceparent.split("-")[2] for turn in turns(draft) if turn.traceparent}
    assert asked == {f"{span.context.span_id:016x}" for span in spans.named("round")}


async def test_span_event_of_a_lost_draft_worker_has_its_reason(tokenizer, spans):
    draft = ScriptedDraft(ANSWER, lost_at=(6,))
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.002), draft) as fleet:
        usage = await answer(fleet, tokenizer)
    assert usage.stats.lost_drafts == 1
    abandoned = spans.one("abandoned round")
    assert abandoned.attributes["outrider.abandoned"] == "lost draft worker"
    events = {
        event.name: event.attributes["outrider.reason"] for event in spans.one("text_completion m").events
    }
    assert "lost by the script" in events["fallback"]
    assert events["rounds"] == "fixed"
    stretch = next(
        span for span in spans.named("plain") if span.attributes["outrider.reason"] != "first token"
    )
    assert stretch.attributes["outrider.reason"] == "lost draft worker"
    summed, reported = counted(spans, usage)
    assert summed == reported


async def test_span_event_of_a_late_draft_has_its_reason(tokenizer, spans):
    draft = ScriptedDraft(ANSWER, silent=asyncio.Event())
    async with fleet_of(ScriptedTarget(ANSWER), draft) as fleet:
        usage = await answer(fleet, tokenizer, propose_deadline_ms=20.0)
    assert usage.stats.late_drafts == 1
    abandoned = spans.one("abandoned round")
    assert abandoned.attributes["outrider.abandoned"] == "late Draft"
    assert abandoned.attributes["outrider.wait_ms"] >= 20.0
    drafter, fallback = spans.one("text_completion m").events
    assert drafter.attributes == {"outrider.drafter": "model", "outrider.reason": "named"}
    assert fallback.attributes["outrider.reason"] == "late Draft: no Draft after 0.020 s"


async def test_span_event_of_a_lost_target_has_its_reason(tokenizer, spans):
    target = ScriptedTarget(ANSWER, lost_at=(4,))
    async with fleet_of(target, ScriptedDraft(ANSWER)) as fleet:
        usage = await answer(fleet, tokenizer)
    assert spans.one("abandoned round").attributes["outrider.abandoned"] == "lost target worker"
    _, reopening = spans.one("text_completion m").events
    assert reopening.name == "reopening"
    assert "lost by the script" in reopening.attributes["outrider.reason"]
    summed, reported = counted(spans, usage)
    assert summed == reported


@pytest.mark.parametrize("speculation", [FIXED, Speculation(mode="off")], ids=["fixed", "off"])
async def test_span_event_of_a_parked_request_comes_once_and_spans_sum_up(tokenizer, spans, speculation):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=1e-3), ScriptedDraft(ANSWER)) as fleet:
        generation = Generation(SETTINGS.model_copy(update={"max_requests": 1}), tokenizer, fleet)
        sampling = Sampling(max_tokens=len(ANSWER))
        batch = Request(("a prompt",), sampling, speculation=speculation, priority="batch")
        token = attach(context_of(TRACEPARENT))
        try:
            prepared = await generation.prepare(batch)
        finally:
            detach(token)
        urgent = await generation.prepare(replace(batch, priority="interactive"))
        async with aclosing(generation.chunks(prepared)) as chunks:
            told = [await anext(chunks)]
            async with aclosing(generation.chunks(urgent)) as others:
                assert [chunk async for chunk in others]
            told += [chunk async for chunk in chunks]
    events = [event.name for event in spans.one("text_completion m").events]
    assert events.count("parked") == 1
    assert "reopening" not in events
    summed, reported = counted(spans, told[-1].usage)
    assert summed == reported


async def test_span_of_a_failed_request_has_the_error_as_status(tokenizer, spans):
    async with fleet_of(
        ScriptedTarget(ANSWER, lost_at=range(2, 9999), lost_with=Cause.LEAVING), ScriptedDraft(ANSWER)
    ) as fleet:
        with pytest.raises(DeadlineError):
            await answer(fleet, tokenizer, request_deadline_s=0.2)
    generation = spans.one("text_completion m")
    assert generation.status.status_code is StatusCode.ERROR
    assert generation.attributes["error.type"] == "DeadlineError"
