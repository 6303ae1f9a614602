"""Metrics of requests under vLLM's names."""

from contextlib import aclosing

import httpx
import pytest

from gateway.api import http_api
from gateway.api.access import Authentication, digest
from gateway.api.openai.chat_template import ChatTemplate
from gateway.errors import OverloadedError
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.observe.metrics import publish
from gateway.settings import GatewaySettings, Speculation
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.published import Published

ANSWER = list(b"an answer of several words")
SETTINGS = GatewaySettings(model="m", tokenizer="unused")
PROMPT = "a prompt"  # a token for each byte


def request(n: int = 1, tokens: int = len(ANSWER)) -> Request:
    return Request((PROMPT,), Sampling(max_tokens=tokens), n=n, speculation=Speculation(mode="off"))


async def answered(generation, request):
    return [chunk async for chunk in generation.chunks(await generation.prepare(request))]


def totals(published):
    """Returns the counters under vLLM's names, by name, or by name and further labels."""
    found = {key: value for key, value in published.totals.items() if key[1:3] == ("m", "0")}
    return {
        key[0].removeprefix("vllm_") if len(key) == 3 else key[0::3]: value for key, value in found.items()
    }


async def test_publish_counts_tokens_and_answers_by_their_ends(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        await answered(generation, request(n=2, tokens=5))
        publish(generation, published)
        publish(generation, published)
    prompt_tokens = len(PROMPT)
    assert totals(published) == {
        "generation_tokens": 10,
        "prompt_tokens": prompt_tokens,
        "prefix_cache_queries": prompt_tokens,
        "prefix_cache_hits": 0,
        ("vllm_request_success", "length"): 2,
    }


async def test_publish_times_of_an_answer_add_up(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.002)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        await answered(generation, request())
        publish(generation, published)
    seen = {name: value for name, ((value, _),) in published.observed.items() if name.startswith("vllm_")}
    queue_s, prefill_s = seen["vllm_request_queue_time_seconds"], seen["vllm_request_prefill_time_seconds"]
    decode_s, total_s = seen["vllm_request_decode_time_seconds"], seen["vllm_e2e_request_latency_seconds"]
    assert seen["vllm_time_to_first_token_seconds"] == pytest.approx(queue_s + prefill_s)
    assert total_s == pytest.approx(queue_s + prefill_s + decode_s)
    token_s = seen["vllm_request_time_per_output_token_seconds"]
    assert token_s * (len(ANSWER) - 1) == pytest.approx(decode_s)
    assert seen["vllm_request_prompt_tokens"] == len(PROMPT)
    assert seen["vllm_request_generation_tokens"] == len(ANSWER)


async def test_publish_load_has_requests_and_the_share_of_the_cache(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.01)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        async with aclosing(generation.chunks(await generation.prepare(request()))) as chunks:
            await anext(chunks)
            (link,) = (link for link in fleet.links() if link.worker.role == "target")
            link.load = rounds_pb2.Load(free_blocks=4, total_blocks=16)
            publish(generation, published)
    assert published.gauges["vllm_num_requests_running", "m", "0"] == 1
    assert published.gauges["vllm_num_requests_waiting", "m", "0"] == 0
    assert published.gauges["vllm_kv_cache_usage_perc", "m", "0"] == 0.75


async def test_publish_without_a_reply_tells_no_share_of_the_cache(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation, published = Generation(SETTINGS, tokenizer, fleet), Published()
        publish(generation, published)
    assert ("vllm_kv_cache_usage_perc", "m", "0") not in published.gauges


async def test_publish_answers_without_an_end_are_aborted_or_failed(tokenizer):
    limits = {"max_requests": 1, "max_waiting": 0}
    async with fleet_of(ScriptedTarget(ANSWER, step_s=0.01)) as fleet:
        generation, published = Generation(SETTINGS.model_copy(update=limits), tokenizer, fleet), Published()
        async with aclosing(generation.chunks(await generation.prepare(request()))) as first:
            await anext(first)
            with pytest.raises(OverloadedError):
                await anext(generation.chunks(await generation.prepare(request(n=3))))
        publish(generation, published)
    counted = totals(published)
    assert counted["vllm_request_success", "error"] == 3
    assert counted["vllm_request_success", "abort"] == 1
    assert counted["prompt_tokens"] == len(PROMPT)
    assert "vllm_e2e_request_latency_seconds" not in published.observed
    assert len(published.observed["vllm_time_to_first_token_seconds"]) == 1


async def test_metrics_endpoint_answers_callers_with_a_key(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        access = Authentication((digest("key"),), anonymous=False)
        generation = Generation(SETTINGS, tokenizer, fleet)
        app = http_api.build(
            generation, ChatTemplate(None, {}), access, recorded=lambda: b"vllm:prompt_tokens_total 3.0\n"
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            refused = await client.get("/metrics")
            answer = await client.get("/metrics", headers={"Authorization": "Bearer key"})
    assert refused.status_code == 401
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text == "vllm:prompt_tokens_total 3.0\n"
