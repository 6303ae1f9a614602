"""OpenAI's HTTP API over workers whose answer is written down beforehand."""

import json
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway import http_api
from gateway.generation import Generation
from gateway.settings import GatewaySettings
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of

TEXT = "The cat sät on the mat."
ANSWER = list(TEXT.encode())
ASK = {"prompt": "x", "max_tokens": len(ANSWER)}


@asynccontextmanager
async def client_of(tokenizer, target, draft=None):
    async with fleet_of(target, draft) as fleet:
        app = http_api.build(Generation(GatewaySettings(model="m", tokenizer="unused"), tokenizer, fleet))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            yield client


@pytest.fixture
async def client(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3])) as client:
        yield client


def events_of(response):
    return [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]


async def test_a_completion(client):
    response = await client.post("/v1/completions", json={**ASK, "seed": 4})
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, len(ANSWER))
    details, record = usage["completion_tokens_details"], usage["speculation"]
    assert details["accepted_prediction_tokens"] == record["accepted"] > 0
    assert details["rejected_prediction_tokens"] == record["drafted"] - record["accepted"] > 0
    assert record["seed"] == 4
    assert response.headers["outrider-seed"] == "4"


async def test_a_stream_is_the_completion_in_pieces(client):
    response = await client.post("/v1/completions", json={**ASK, "stream": True})
    *events, done = events_of(response)
    chunks = [json.loads(event) for event in events]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_ends_with_usage_where_it_is_asked_for(client):
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = events_of(await client.post("/v1/completions", json=ask))
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["completion_tokens"] == len(ANSWER)


async def test_null_and_openai_s_own_fields_are_accepted(client):
    ask = {**ASK, "n": 1, "best_of": 1, "echo": False, "suffix": None, "user": "u", "temperature": None}
    response = await client.post("/v1/completions", json={**ask, "stop": None, "logit_bias": {"3": -1}})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"n": 2}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"speculation": {"depth": 17}}, "speculation.depth"),
        ({"speculation": {"drafter": "magic"}}, "speculation.drafter"),
        ({"max_token": 5}, "max_token"),
        ({"logprobs": 2}, "logprobs"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(client, wrong, field):
    response = await client.post("/v1/completions", json={**ASK, **wrong})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".list")[0].partition(".str")[0] == field
    assert field.rpartition(".")[2] in error["message"]


async def test_another_model_is_not_found(client):
    response = await client.post("/v1/completions", json={**ASK, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_model_and_the_workers_are_listed(client):
    models = (await client.get("/v1/models")).json()
    health = (await client.get("/health")).json()
    assert [model["id"] for model in models["data"]] == ["m"]
    assert [worker["role"] for worker in health["workers"]] == ["target", "draft"]


async def test_without_a_target_the_service_is_unavailable(tokenizer):
    async with client_of(tokenizer, None) as client:
        for stream in (False, True):
            response = await client.post("/v1/completions", json={**ASK, "stream": stream})
            assert response.status_code == 503
            assert "no target worker" in response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503


async def test_a_target_lost_under_a_stream_is_said_in_the_stream(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER, lost_after=4), ScriptedDraft(ANSWER)) as client:
        events = events_of(await client.post("/v1/completions", json={**ASK, "stream": True}))
    assert "lost by the script" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
