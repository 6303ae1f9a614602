"""A real collector beside the real service: one whole trace for every request that is sampled."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from outrider.demo.prompts import prompts
from protos import generation_pb2, generation_pb2_grpc
from tests.fakes.collector import Collector, Span
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.running import Service

PROMPT = prompts("json", 1)[0]
FIXED = {"mode": "fixed", "depth": 4, "report": True}
CLIENT_SPAN = "b7ad6b7169203331"
OF_WORKERS = {"verify", "plain decoding", "draft"}
PARTS = {"queue", "forward", "sample"}
SUMMED = ("drafted", "reached", "accepted", "target_passes", "prepared_for", "continued", "wasted")


def ask(client: httpx.Client, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The trace's id and the usage."""
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
    asked = {"temperature": 0, "ignore_eos": True, "speculation": {"report": True}, **fields}
    body = {"prompt": PROMPT, **asked}
    response = client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return trace_id, response.json()["usage"]


def below(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent == parent.id]


def children(spans: list[Span], parent: Span) -> set[str]:
    return {span.name for span in below(spans, parent)}


def orphans(spans: list[Span]) -> list[Span]:
    """Returns spans without a parent here; a request has the parent of its client."""
    ids = {span.id for span in spans}
    return [
        span
        for span in spans
        if span.parent not in ids and not (span.name.startswith("POST") and span.parent == CLIENT_SPAN)
    ]


def lacks(usage: dict[str, Any], *, also_drafts: bool = True) -> Callable[[list[Span]], list[str]]:
    """Returns a function that lists what a trace lacks: rounds, Drafts, Verdicts, parts or parents.

    also_drafts: False if the draft worker was killed with spans that it had not sent yet.
    """

    def check(spans: list[Span]) -> list[str]:
        decoded = [span for span in spans if span.attributes.get("outrider.tokens")]
        drafted = [span for span in decoded if also_drafts and waited(span)]
        wanted = {
            "rounds": sum(span.name == "round" for span in spans) == usage["speculation"]["rounds"],
            "request": any(span.name.startswith("POST") for span in spans),
            "parents": not orphans(spans),
            "verdicts": all({"verify", "plain decoding"} & children(spans, span) for span in decoded),
            "Drafts": all("draft" in children(spans, span) for span in drafted),
            "parts": all(children(spans, span) == PARTS for span in spans if span.name in OF_WORKERS),
        }
        return [name for name, is_there in wanted.items() if not is_there]

    return check


def waited(span: Span) -> bool:
    """Whether a round waited for its Draft: the target had none, nor was one made during plain decoding."""
    return bool(span.attributes.get("outrider.waited"))


def traced(client: httpx.Client, collector: Collector, **fields: Any) -> tuple[list[Span], dict[str, Any]]:
    trace_id, usage = ask(client, **fields)
    lack = lacks(usage)
    spans = collector.trace(trace_id, lambda found: not lack(found), LIMIT_S)
    assert not lack(spans), [(span.service, span.name, span.attributes) for span in spans]
    return spans, usage


def assert_nested(spans: list[Span]) -> None:
    """Each within its parent, but what nobody waited for any more."""
    by_id = {span.id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent)
        if parent is not None and parent.name != "abandoned round":
            assert parent.start <= span.start <= span.end <= parent.end, (parent, span)


def assert_sums(spans: list[Span], usage: dict[str, Any]) -> None:
    own = [span for span in spans if "outrider.tokens" in span.attributes]
    told = {name: usage["speculation"][name] for name in SUMMED}
    assert {name: sum(span.attributes[f"outrider.{name}"] for span in own) for name in SUMMED} == told
    assert sum(span.attributes["outrider.tokens"] for span in own) == usage["completion_tokens"]
    (generation,) = [span for span in spans if span.name.startswith("text_completion")]
    assert generation.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert generation.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]


def test_trace_of_rounds_is_nested_and_adds_up_to_the_usage(
    client: httpx.Client, collector: Collector
) -> None:
    spans, usage = traced(client, collector, max_tokens=64, speculation=FIXED)
    assert_nested(spans)
    assert_sums(spans, usage)
    assert {span.service for span in spans} == {"outrider-gateway", "outrider-target", "outrider-draft"}
    for span in [span for span in spans if span.name == "round"]:
        assert children(spans, span) == ({"draft", "verify"} if waited(span) else {"verify"})
        assert not (waited(span) and span.attributes["outrider.continued"])


def test_rounds_that_the_pace_decides_on(client: httpx.Client, collector: Collector) -> None:
    spans, usage = traced(client, collector, max_tokens=200, temperature=1.0, seed=3, n=2)
    assert_nested(spans)
    assert_sums(spans, usage)
    whys = {span.attributes["outrider.reason"] for span in spans if "outrider.reason" in span.attributes}
    assert whys <= {"first token", "thresholds", "measured", "trial", "late Draft", "last token"}


def test_plain_decoding_is_one_stretch(client: httpx.Client, collector: Collector) -> None:
    spans, usage = traced(client, collector, max_tokens=150, speculation={"mode": "off", "report": True})
    assert_nested(spans)
    assert_sums(spans, usage)
    (stretch,) = [span for span in spans if span.name == "plain"]
    assert stretch.attributes["outrider.reason"] == "off"
    (decoding,) = below(spans, stretch)
    assert decoding.attributes["outrider.steps"] >= 150  # and those that took the prompt in


def test_trace_of_a_grpc_request_continues_that_of_the_client(service: Service, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    request = generation_pb2.GenerateRequest(text=PROMPT, sampling=generation_pb2.Sampling(max_tokens=16))
    metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN}-01"),)
    with grpc.insecure_channel(service.grpc) as channel:
        list(
            generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=LIMIT_S, metadata=metadata)
        )
    names = lambda spans: {span.name for span in spans}  # noqa: E731
    method = "outrider.v1.Generation/Generate"
    spans = collector.trace(trace_id, lambda spans: method in names(spans), LIMIT_S)
    assert method in names(spans)


def test_tracing_without_samples_records_nothing(client: httpx.Client, collector: Collector) -> None:
    response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8})
    assert response.status_code == 200
    traced(client, collector, max_tokens=8)  # the other request's spans would have come too
    assert all(span.parent for span in collector.spans)


def workers(client: httpx.Client, role: str) -> list[int]:
    """Process ids of those that are alive."""
    found = client.get("/health").json()["workers"]
    return [w["pid"] for w in found if w["role"] == role and psutil.pid_exists(w["pid"])]


@pytest.fixture
def draft_pid(client: httpx.Client) -> Iterator[int]:
    """May be killed: the test ends when there is another."""
    (pid,) = workers(client, "draft")
    yield pid
    wait_until(lambda: workers(client, "draft"), START_S)


@pytest.mark.slow  # another is started, for those that come after
def test_lost_draft_worker_is_told_with_its_reason(
    client: httpx.Client, collector: Collector, draft_pid: int, tmp_path: Path
) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
    body = {
        "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "speculation": FIXED,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for number, line in enumerate(lines):
            if number == 10:
                psutil.Process(draft_pid).kill()
            if line != "[DONE]":
                last = line
    usage = httpx.Response(200, text=last).json()["usage"]
    assert usage["speculation"]["lost_drafts"] == 1
    lack = lacks(usage, also_drafts=False)
    spans = collector.trace(trace_id, lambda found: not lack(found), LIMIT_S)
    assert not lack(spans), [(span.service, span.name, span.attributes) for span in spans]
    assert_nested(spans)
    assert_sums(spans, usage)
    (generation,) = [span for span in spans if span.name.startswith("text_completion")]
    assert generation.events["fallback"].startswith("lost draft worker")
    assert "lost draft worker" in {
        span.attributes.get("outrider.reason") for span in spans if span.name == "plain"
    }
