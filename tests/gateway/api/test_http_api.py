"""HTTP API: lists of models and workers, access, and failures."""

import asyncio
import json
import time
from functools import partial

import pytest

from gateway.api.openai.completions import CompletionAnswer
from tests.fakes.conversations import Cause
from tests.fakes.scripted import MAX_LENGTH, ScriptedDraft, ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, client_of, events_of
from tests.support.patience import eventually


async def test_loads_over_http_equal_those_of_grpc(client):
    await client.post("/v1/completions", json={**ASK, "task": "t", "speculation": {"mode": "fixed"}})
    body = (await client.get("/loads")).json()
    assert (body["running"], [task["task"] for task in body["tasks"]]) == (0, ["t"])
    assert body["tasks"][0]["tokens"] == len(ANSWER)
    assert {worker["role"] for worker in body["workers"]} == {"target", "draft"}


async def test_health_and_models_list_model_and_workers(client):
    models = (await client.get("/v1/models")).json()
    health = (await client.get("/health")).json()
    assert [model["id"] for model in models["data"]] == ["m"]
    assert [worker["role"] for worker in health["workers"]] == ["target", "draft"]


async def test_models_entry_has_the_fields_of_openai_and_vllm(client):
    (entry,) = (await client.get("/v1/models")).json()["data"]
    assert entry == (await client.get("/v1/models/m")).json()
    assert entry.pop("created") <= time.time()
    assert entry == {
        "id": "m",
        "object": "model",
        "owned_by": "outrider",
        "root": "m",
        "parent": None,
        "max_model_len": MAX_LENGTH,
    }


async def test_models_without_a_target_have_no_length(tokenizer):
    async with client_of(tokenizer, None) as client:
        (entry,) = (await client.get("/v1/models")).json()["data"]
    assert entry["max_model_len"] is None


async def test_health_slow_worker_names_its_reasons(tokenizer):
    slow = ScriptedTarget(ANSWER, slow_because=("attention gathers its blocks",))
    async with client_of(tokenizer, slow, ScriptedDraft(ANSWER)) as client:
        workers = (await client.get("/health")).json()["workers"]
    told = {worker["role"]: worker["slow_because"] for worker in workers}
    assert told == {"target": ["attention gathers its blocks"], "draft": []}


async def test_health_target_drafter_out_of_use_has_its_reason(tokenizer):
    target = ScriptedTarget(ANSWER, no_drafts_because={"early_exit": "no part of it would pay"})
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER)) as client:
        await client.post("/v1/completions", json=ASK)
        workers = (await client.get("/health")).json()["workers"]
    told = {worker["role"]: worker["no_drafts_because"] for worker in workers}
    assert told == {"target": {"early_exit": "no part of it would pay"}, "draft": {}}


async def test_http_without_a_target_is_unavailable(tokenizer):
    async with client_of(tokenizer, None) as client:
        for stream in (False, True):
            response = await client.post("/v1/completions", json={**ASK, "stream": stream})
            assert response.status_code == 503
            assert "no target worker" in response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503


async def test_http_deadline_passed_is_a_timeout(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(2, 10_000), lost_with=Cause.LEAVING)
    async with client_of(tokenizer, target, request_deadline_s=0.1) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 504


async def test_http_too_long_body_is_refused_while_it_is_read(tokenizer):
    async def endless():
        while True:
            yield b" " * 1000

    async with client_of(tokenizer, ScriptedTarget(ANSWER), max_message_bytes=5000) as client:
        response = await client.post(
            "/v1/completions", content=endless(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert "5000" in response.json()["error"]["message"]


@pytest.mark.slow
async def test_http_full_queue_gives_a_retry_delay(tokenizer):
    silent = ScriptedTarget(ANSWER, lost_at=range(2, 10_000), lost_with=Cause.LEAVING)
    async with client_of(tokenizer, silent, max_requests=1, max_waiting=0, request_deadline_s=6.0) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await eventually(lambda: silent.requests)
        response = await client.post("/v1/completions", json=ASK)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert (await waiting).status_code == 504


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/m"])
async def test_http_configured_keys_are_needed(tokenizer, path):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=["secret"]) as client:

        async def status(**headers):
            body = {**ASK} if path == "/v1/completions" else CHAT
            method = client.get if "models" in path else partial(client.post, json=body)
            return (await method(path, headers=headers)).status_code

        assert await status() == await status(Authorization="Bearer wrong") == 401
        assert await status(Authorization="Bearer secret") == 200


async def test_probes_need_no_key_and_learn_nothing_about_workers(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER), keys=["secret"]) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        known = await client.get("/health", headers={"Authorization": "Bearer secret"})
        assert [worker["role"] for worker in known.json()["workers"]] == ["target", "draft"]


async def test_http_without_keys_refuses_other_machines(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), host="10.1.2.3") as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 401


async def test_http_defect_hides_its_traceback(tokenizer, monkeypatch):
    def fail(*_):
        raise RuntimeError("a secret")

    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        client._transport.raise_app_exceptions = False
        monkeypatch.setattr(CompletionAnswer, "chunk", fail)
        monkeypatch.setattr(CompletionAnswer, "whole", fail)
        whole = await client.post("/v1/completions", json=ASK)
        stream = await client.post("/v1/completions", json={**ASK, "stream": True})
    error, done = events_of(stream)
    assert (whole.status_code, done) == (500, "[DONE]")
    assert whole.json()["error"]["type"] == json.loads(error)["error"]["type"] == "server_error"
    assert "secret" not in whole.text + stream.text


async def test_http_unknown_path_or_method_has_an_error_body(client):
    for response in (await client.get("/v2"), await client.get("/v1/completions")):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["message"]
        assert response.json()["error"]["param"] is None


async def test_metrics_have_the_names_that_load_generators_read(client):
    ask = {**ASK, "speculation": {"mode": "fixed", "depth": 4, "report": True}}
    told = (await client.post("/v1/completions", json=ask)).json()
    speculation, metrics = told["usage"]["speculation"], told["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 == 5
    assert sum(histogram) == metrics["num_spec_steps"] == speculation["rounds"] > 0
    assert sum(length * rounds for length, rounds in enumerate(histogram)) == speculation["accepted"]
    assert metrics["num_accepted_draft_tokens"] == speculation["accepted"]
    assert metrics["num_draft_tokens"] == speculation["drafted"]
    expected = 1 + speculation["accepted"] / speculation["rounds"]
    assert metrics["mean_acceptance_length"] == pytest.approx(expected)
    assert metrics["draft_acceptance_rate"] == pytest.approx(speculation["accepted"] / speculation["drafted"])


async def test_metrics_of_plain_decoding_have_a_histogram_of_zeros(client):
    ask = {**ASK, "speculation": {"mode": "off", "report": True}}
    told = (await client.post("/v1/completions", json=ask)).json()["metrics"]["speculative_decoding"]
    assert (told["acceptance_histogram"], told["num_spec_tokens"], told["num_spec_steps"]) == ([0], 0, 0)


@pytest.mark.parametrize(("path", "ask"), [("completions", ASK), ("chat/completions", CHAT)])
async def test_stream_report_has_metrics_with_the_usage(client, path, ask):
    options = {"stream": True, "stream_options": {"include_usage": True}, "speculation": {"report": True}}
    *_, last, _ = events_of(await client.post(f"/v1/{path}", json={**ask, **options}))
    assert "speculative_decoding" in json.loads(last)["metrics"]


async def test_metrics_of_several_answers_are_left_out(client):
    ask = {**ASK, "n": 2, "speculation": {"report": True}}
    assert "metrics" not in (await client.post("/v1/completions", json=ask)).json()


async def test_adapters_are_models_of_the_target_and_reach_it_alone(tokenizer):
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with client_of(tokenizer, target, draft, adapters=("a", "b")) as client:
        models = (await client.get("/v1/models")).json()["data"]
        body = {**ASK, "speculation": {"mode": "fixed"}, "task": "t"}
        answers = [
            (await client.post("/v1/completions", json={**body, "model": name})).json() for name in "bm"
        ]
        loads = (await client.get("/loads")).json()
        refused = await client.post("/v1/completions", json={**ASK, "model": "c"})
    assert [(model["id"], model["parent"]) for model in models] == [("m", None), ("a", "m"), ("b", "m")]
    assert [answer["model"] for answer in answers] == ["b", "m"]
    openings = [
        [request.open.adapter.name for request in worker.requests if request.HasField("open")]
        for worker in (target, draft)
    ]
    assert openings == [["b", ""], ["", ""]]
    assert {task["task"] for task in loads["tasks"]} == {"b/t", "t"}
    assert refused.status_code == 404
    assert "'c' is not served, 'm' and 'a' and 'b' are" in refused.json()["error"]["message"]
