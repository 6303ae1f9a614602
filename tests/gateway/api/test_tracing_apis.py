"""Spans of requests over HTTP and gRPC continue the trace of the caller."""

import pytest
from opentelemetry.trace import SpanKind

from protos import generation_pb2
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.fakes.spans import CLIENT_SPAN_ID, TRACEPARENT
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER, client_of


@pytest.mark.parametrize("stream", [False, True])
async def test_trace_over_http_continues_the_caller_s(tokenizer, spans, stream):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        client.headers["traceparent"] = TRACEPARENT
        await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        await client.post("/v1/completions", json={"prompt": "x", "temperature": -1})
        await client.get("/health")
    served, refused = spans.named("POST /v1/completions")
    assert (served.kind, served.parent.span_id) == (SpanKind.SERVER, CLIENT_SPAN_ID)
    assert [span.attributes["http.response.status_code"] for span in (served, refused)] == [200, 400]
    (generation,) = spans.below(served)
    assert generation.name == "text_completion m"
    assert served.start_time <= generation.start_time <= generation.end_time <= served.end_time


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_trace_over_grpc_continues_the_caller_s(tokenizer, spans, method):
    request = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.Sampling(max_tokens=8))
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        replies = getattr(servicer_of(fleet, tokenizer), method)(request, Context(traceparent=TRACEPARENT))
        if method == "Generate":
            assert [reply async for reply in replies]
        else:
            await replies
        await servicer_of(fleet, tokenizer).GetModel(
            generation_pb2.GetModelRequest(), Context(traceparent=TRACEPARENT)
        )
    (served,) = [span for span in spans if span.parent.span_id == CLIENT_SPAN_ID]
    assert (served.name, served.kind) == (f"outrider.v1.Generation/{method}", SpanKind.SERVER)
    (generation,) = spans.below(served)
    assert generation.attributes["gen_ai.usage.output_tokens"] == 8
