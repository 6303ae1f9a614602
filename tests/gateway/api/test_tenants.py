"""Tenants over both APIs: limits with their headers, priorities, tiers."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from gateway.api.access import digest
from gateway.api.grpc_api import RETRY_DELAY
from gateway.api.limit_headers import duration
from gateway.errors import InvalidRequestError, LimitReachedError
from gateway.settings import TenantSettings
from gateway.tenants.tenant import Tenant
from protos import generation_pb2
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of, events_of
from tests.support.patience import eventually

MESSAGE = {"model": "m", "messages": CHAT["messages"], "max_tokens": len(ANSWER)}
RESPONSE = {"input": "x", "max_output_tokens": len(ANSWER)}
USED = 1 + len(ANSWER)  # tokens of ASK and its answer
BODIES = {"completions": ASK, "chat/completions": CHAT, "responses": RESPONSE, "messages": MESSAGE}
KEYS = {"tenant_keys": {digest("named"): "search"}}


def limits_of(**limits):
    return {"tenants": {"search": TenantSettings(**limits)}, **KEYS}


@asynccontextmanager
async def client_with(tokenizer, key="named", **limits):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target, keys=("named", "plain"), **limits_of(**limits)) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        yield client


def rate_limits(response):
    return {name: value for name, value in response.headers.items() if "ratelimit" in name}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_answer_tells_openais_clients_what_is_left(tokenizer, path, stream):
    async with client_with(tokenizer, requests_per_minute=60, tokens_per_minute=6000) as client:
        response = await client.post(f"/v1/{path}", json={**BODIES[path], "stream": stream})
    told = rate_limits(response)
    assert told["x-ratelimit-limit-requests"] == "60"
    assert told["x-ratelimit-limit-tokens"] == "6000"
    assert told["x-ratelimit-remaining-requests"] == "59"
    assert re.fullmatch(r"\d+ms|1s", told["x-ratelimit-reset-requests"])
    assert 5900 < int(told["x-ratelimit-remaining-tokens"]) < 6000
    assert len(told) == 6


async def test_answer_tells_anthropics_clients_what_is_left(tokenizer):
    async with client_with(tokenizer, requests_per_minute=1) as client:
        response = await client.post("/v1/messages", json=MESSAGE)
        refused = await client.post("/v1/messages", json=MESSAGE)
    told = rate_limits(response)
    assert told.pop("anthropic-ratelimit-requests-limit") == "1"
    assert told.pop("anthropic-ratelimit-requests-remaining") == "0"
    reset = datetime.strptime(told.pop("anthropic-ratelimit-requests-reset"), "%Y-%m-%dT%H:%M:%S%z")
    assert timedelta(seconds=55) < reset - datetime.now(UTC) < timedelta(seconds=62)
    assert not told
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert rate_limits(refused)["anthropic-ratelimit-requests-limit"] == "1"


@pytest.mark.parametrize("path", BODIES)
async def test_limit_that_is_reached_refuses_and_names_itself(tokenizer, path):
    async with client_with(tokenizer, requests_per_minute=1) as client:
        assert (await client.post(f"/v1/{path}", json=BODIES[path])).status_code == 200
        refused = await client.post(f"/v1/{path}", json={**BODIES[path], "stream": True})
        assert refused.status_code == 429
        assert "requests_per_minute=1 of tenant 'search'" in refused.json()["error"]["message"]
        assert 55 <= int(refused.headers["Retry-After"]) <= 60
        assert rate_limits(refused)
        client.headers["Authorization"] = "Bearer plain"  # another tenant
        other = await client.post(f"/v1/{path}", json=BODIES[path])
        assert (other.status_code, rate_limits(other)) == (200, {})


async def test_tokens_of_a_finished_answer_are_what_was_used(tokenizer):
    async with client_with(tokenizer, tokens_per_minute=1000) as client:
        await client.post("/v1/completions", json={**ASK, "stop": TEXT[4]})
        used = [await client.post("/v1/completions", json=ASK) for _ in range(2)][1]
    # The first answer ended early. Of the second nothing is known yet when the headers are written.
    left = int(used.headers["x-ratelimit-remaining-tokens"])
    assert 1000 - 3 * USED <= left <= 1000 - 2 * USED + 40


async def test_limit_headers_are_absent_from_other_endpoints_and_health(tokenizer):
    async with client_with(tokenizer, requests_per_minute=1) as client:
        for path in ("/v1/models", "/health", "/loads"):
            response = await client.get(path)
            assert (response.status_code, rate_limits(response)) == (200, {})
            assert "search" not in response.text


@pytest.mark.parametrize(
    ("seconds", "written"), [(0.0, "0ms"), (0.0115, "12ms"), (1.0, "1s"), (59.2, "1m0s"), (360.0, "6m0s")]
)
def test_duration_is_written_as_openai_writes_it(seconds, written):
    assert duration(seconds) == written


TIERS = {
    (None, 0): (None, "interactive"),
    ("auto", 0): ("default", "interactive"),
    ("default", 7): ("default", "interactive"),
    ("flex", -1): ("flex", "batch"),
    ("flex", "interactive"): ("default", "interactive"),
    ("priority", 0): ("priority", "interactive"),
    ("priority", "batch"): ("flex", "batch"),
    ("scale", 0): ("default", "interactive"),
}


@pytest.fixture
def priorities(monkeypatch):
    """Priorities and numbers of the claims of all requests."""
    told, claim = [], Tenant.claim

    def recorded(self, *arguments):
        made = claim(self, *arguments)
        told.append((made.priority, made.order))
        return made

    monkeypatch.setattr(Tenant, "claim", recorded)
    return told


@pytest.mark.parametrize(("asked", "given"), TIERS.items(), ids=str)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_tier_decides_the_priority_and_is_told(tokenizer, priorities, path, asked, given):
    (tier, priority), (told, served) = asked, given
    fields = {"service_tier": tier, "priority": priority}
    async with client_with(tokenizer) as client:
        response = await client.post(f"/v1/{path}", json={**BODIES[path], **fields})
        assert response.status_code == 200, response.text
        assert response.json().get("service_tier") == told
        streamed = await client.post(f"/v1/{path}", json={**BODIES[path], **fields, "stream": True})
    assert priorities == [(served, priority if isinstance(priority, int) else 0)] * 2
    first = json.loads(re.search(r"data: (\{.*)", streamed.text)[1])
    assert first.get("response", first).get("service_tier") == told


async def test_tenant_that_may_not_be_interactive_is_served_as_batch_and_told_so(tokenizer, priorities):
    async with client_with(tokenizer, highest_priority="batch") as client:
        response = await client.post("/v1/completions", json={**ASK, "service_tier": "priority"})
        message = await client.post("/v1/messages", json={**MESSAGE, "service_tier": "auto"})
    assert response.json()["service_tier"] == "flex"
    assert message.json()["usage"]["service_tier"] == "batch"
    assert priorities == [("batch", 0)] * 2


async def test_tier_of_a_message_is_told_in_its_usage(tokenizer, priorities):
    async with client_with(tokenizer) as client:
        plain = await client.post("/v1/messages", json={**MESSAGE, "priority": 3})
        named = await client.post(
            "/v1/messages", json={**MESSAGE, "service_tier": "standard_only", "stream": True}
        )
    assert "service_tier" not in plain.json()["usage"]
    (delta,) = re.findall(r'data: (\{"type": "message_delta".*)', named.text)
    assert json.loads(delta)["usage"]["service_tier"] == "standard"
    assert priorities == [("interactive", 3), ("interactive", 0)]


@pytest.mark.parametrize(
    "wrong", [{"priority": 1.5}, {"priority": True}, {"priority": 2**63}, {"service_tier": "gold"}], ids=str
)
@pytest.mark.parametrize("path", BODIES)
async def test_priority_and_tier_that_are_unknown_are_refused_by_name(tokenizer, path, wrong):
    async with client_with(tokenizer) as client:
        response = await client.post(f"/v1/{path}", json={**BODIES[path], **wrong})
    assert response.status_code == 400
    assert next(iter(wrong)) in response.json()["error"]["message"]


def generate(**fields):
    sampling = generation_pb2.Sampling(max_tokens=len(ANSWER))
    return generation_pb2.GenerateRequest(text="x", sampling=sampling, **fields)


async def test_grpc_limit_that_is_reached_is_resource_exhausted_with_a_delay(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer, keys=("named",), **limits_of(requests_per_minute=1))
        contexts = [Context(authorization="Bearer named") for _ in range(2)]
        assert (await servicer.Complete(generate(), contexts[0])).choices[0].text == TEXT
        with pytest.raises(LimitReachedError):
            await servicer.Complete(generate(), contexts[1])
    assert contexts[1].code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "requests_per_minute=1 of tenant 'search'" in contexts[1].details
    ((name, delay_ms),) = contexts[1].trailing
    assert (name, 55_000 <= int(delay_ms) <= 60_000) == (RETRY_DELAY, True)


@pytest.mark.parametrize(
    ("given", "claimed"),
    [
        ("", ("interactive", 0)),
        ("interactive", ("interactive", 0)),
        ("batch", ("batch", 0)),
        ("-12", ("interactive", -12)),
    ],
)
async def test_grpc_priority_is_a_word_or_an_integer(tokenizer, priorities, given, claimed):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        await servicer_of(fleet, tokenizer).Complete(generate(priority=given), Context())
    assert priorities == [claimed]


async def test_grpc_priority_that_is_neither_is_refused_by_name(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        for wrong in ("1.5", "+1", " 1", "9" * 40):
            with pytest.raises(InvalidRequestError, match=r"priority: .* or an integer is accepted"):
                await servicer_of(fleet, tokenizer).Complete(generate(priority=wrong), Context())


async def test_http_interactive_request_passes_a_stream_of_batch(tokenizer):
    """The stream goes on after it, to the same text."""
    target = ScriptedTarget(ANSWER, step_s=0.01)
    async with client_of(tokenizer, target, max_requests=1) as client:
        batch = {**ASK, "service_tier": "flex", "stream": True, "speculation": {"mode": "off"}}
        streaming = asyncio.create_task(client.post("/v1/completions", json=batch))
        await eventually(lambda: target.said >= 3)
        urgent = await client.post("/v1/completions", json=ASK)
        assert urgent.json()["choices"][0]["text"] == TEXT
        assert not streaming.done()
        *told, _ = events_of(await streaming)
    assert "".join(json.loads(event)["choices"][0]["text"] for event in told) == TEXT
