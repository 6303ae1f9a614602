"""OpenAI's HTTP API over workers whose answer is written down beforehand."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api import http_api
from gateway.api.access import Authentication, digest
from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.completions import CompletionAnswer, CompletionRequest
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from protos import generation_pb2
from protos.stream_status import LEAVING
from tests.fakes import scripted
from tests.fakes.scripted import MAX_LENGTH, ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import LIMIT_S, eventually

TEXT = "The cat sät on the mat."
ANSWER = list(TEXT.encode())
ASK = {"prompt": "x", "max_tokens": len(ANSWER)}


TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with a user') }}{% endif %}",
    {},
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(ANSWER)}


@asynccontextmanager
async def client_of(tokenizer, *workers, template=TEMPLATE, keys=(), host="127.0.0.1", **limits):
    settings = GatewaySettings(model="m", tokenizer="unused", **limits)
    authentication = Authentication(tuple(map(digest, keys)), anonymous=False)
    async with fleet_of(*workers) as fleet:
        app = http_api.build(Generation(settings, tokenizer, fleet), template, authentication)
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
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
    details, stats = usage["completion_tokens_details"], usage["speculation"]
    assert details["accepted_prediction_tokens"] == stats["accepted"] > 0
    assert details["rejected_prediction_tokens"] == stats["drafted"] - stats["accepted"] > 0
    assert stats["seed"] == 4
    assert response.headers["outrider-seed"] == "4"


async def test_a_stream_is_the_completion_in_pieces(client):
    response = await client.post("/v1/completions", json={**ASK, "stream": True})
    *events, done = events_of(response)
    chunks = [json.loads(event) for event in events]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert str(chunks[0]["outrider"]["seed"]) == response.headers["outrider-seed"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_ends_with_usage_where_it_is_asked_for(client):
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = events_of(await client.post("/v1/completions", json=ask))
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["completion_tokens"] == len(ANSWER)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_tells_origins_and_rounds_where_it_is_asked_for(client, path):
    fixed = {"mode": "fixed", "depth": 4}
    own = ASK if path == "completions" else CHAT
    options = {"include_rounds": True, "include_usage": True}
    ask = {**own, "stream": True, "stream_options": options, "speculation": fixed}
    *lines, _ = events_of(await client.post(f"/v1/{path}", json=ask))
    *events, last = map(json.loads, lines)
    told = [event["outrider"] for event in events if "tokens" in event.get("outrider", {})]
    tokens = [token for details in told for token in details["tokens"]]
    rounds = [details["round"] for details in told if "round" in details]
    stats = last["usage"]["speculation"]
    assert "".join(token["text"] for token in tokens) == TEXT
    assert [token["origin"] for token in tokens].count("accepted") == stats["accepted"]
    assert sum(len(round_["drafted"]) for round_ in rounds) == stats["drafted"]
    assert rounds[0]["drafted"] == ["h", "e", "!", "c"]
    assert rounds[0]["accepted"] == [0, 1]
    assert {"draft_ms", "target_ms", "queue_ms", "step_ms", "reason", "continued"} <= rounds[0].keys()


async def test_loads_are_what_grpc_tells(client):
    await client.post("/v1/completions", json={**ASK, "task": "t", "speculation": {"mode": "fixed"}})
    body = (await client.get("/loads")).json()
    assert (body["running"], [task["task"] for task in body["tasks"]]) == (0, ["t"])
    assert body["tasks"][0]["tokens"] == len(ANSWER)
    assert {worker["role"] for worker in body["workers"]} == {"target", "draft"}


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
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"verification": "block"}, "verification"),
        ({"speculation": {"verification": "luck"}}, "speculation.verification"),
        ({"priority": "urgent"}, "priority"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"min_tokens": 30}, "max_tokens"),
        ({"allowed_token_ids": [1], "bad_token_ids": [1]}, "bad_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "y"}, "suffix"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"speculation": {"depth": 17}}, "speculation.depth"),
        ({"speculation": {"drafter": "magic"}}, "speculation.drafter"),
        ({"max_token": 5}, "max_token"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"stop": "x" * 1025}, "stop.0"),
        ({"logit_bias": dict.fromkeys(range(5000), 1)}, "logit_bias"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 1000}, "allowed_token_ids"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"task": "x" * 65}, "task"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(client, wrong, field):
    response = await client.post("/v1/completions", json={**ASK, **wrong})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("many", "field"),
    [
        ({"stop_token_ids": [-1] * 100_000}, "stop_token_ids"),
        ({"logit_bias": {f"k{i}": 1 for i in range(4000)}}, "body"),
        ({"logit_bias": {f"k{i}": 1 for i in range(50_000)}}, "logit_bias"),
        ({f"f{i}": 1 for i in range(50_000)}, "body"),
        ({"messages": [{"role": "judge"}] * 4000}, "messages.0.role"),
        ({"messages": CHAT["messages"] * 5000}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_many_mistakes_are_not_told_one_by_one(client, many, field):
    """It would take seconds, in which no stream of this gateway moves."""
    response = await client.post("/v1/chat/completions", json={**CHAT, **many})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


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


async def test_what_goes_wrong_under_a_stream_is_said_in_the_stream(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(5, 10_000), lost_with=LEAVING)
    # It is given up after 0.56 s, when the next attempt would come too late.
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER), request_deadline_s=1.1) as client:
        events = events_of(await client.post("/v1/completions", json={**ASK, "stream": True}))
    assert "lost by the script" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"


async def test_a_deadline_that_passes_is_a_timeout(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(2, 10_000), lost_with=LEAVING)
    async with client_of(tokenizer, target, request_deadline_s=0.1) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 504


async def test_a_chat_completion(tokenizer):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert bytes(target.requests[1].plain.turn.tokens or target.requests[1].verify.turn.tokens) == b"user:x;"


async def test_a_chat_stream_begins_with_whose_turn_it_is(client):
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 2})
    *events, done = events_of(response)
    chunks = [json.loads(event) for event in events]
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:3]] == [
        "assistant",
        "assistant",
        None,
    ]
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"max_tokens": MAX_LENGTH}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": MAX_LENGTH}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * MAX_LENGTH}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"prompt": "x"}, "prompt"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]},
            "messages.0.annotations",
        ),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"modalities": ["audio"]}, "modalities.0"),
    ],
    ids=str,
)
async def test_what_is_wrong_with_a_chat_is_named(client, wrong, field):
    response = await client.post("/v1/chat/completions", json={**CHAT, **wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_openai_s_own_fields_of_a_chat_are_accepted_where_they_ask_for_nothing_more(client):
    ask = {"store": False, "modalities": ["text"], "service_tier": "auto", "tools": [], "tool_choice": "none"}
    response = await client.post(
        "/v1/chat/completions", json={**CHAT, **ask, "response_format": {"type": "text"}, "user": "u"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    "harmless",
    [
        {"metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False, "functions": []},
        {"reasoning_effort": "low", "verbosity": "high", "service_tier": "flex", "function_call": "none"},
        {"prompt_cache_key": "k", "safety_identifier": "s"},
        {"prediction": {"type": "content", "content": "x"}},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
        {"messages": [{"role": "user", "content": "x", "annotations": [], "tool_calls": []}]},
    ],
    ids=str,
)
async def test_hints_and_labels_of_a_chat_change_nothing(client, harmless):
    response = await client.post("/v1/chat/completions", json={**CHAT, **harmless})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_of_two_limits_max_completion_tokens_holds(client, path):
    own = ASK if path == "completions" else CHAT
    body = (await client.post(f"/v1/{path}", json={**own, "max_completion_tokens": 3})).json()
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("seed", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (7, 7)])
async def test_a_negative_seed_stands_for_one_that_is_not_and_is_told_as_it_came(tokenizer, seed, used):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        response = await client.post("/v1/completions", json={**ASK, "seed": seed})
    assert target.requests[0].open.sampling.seed == used
    assert response.headers["outrider-seed"] == str(seed)
    assert response.json()["usage"]["speculation"]["seed"] == seed


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_usage_comes_with_every_event_where_it_is_asked_for(client, path):
    """As guidellm asks."""
    own = {"prompt": "x"} if path == "completions" else {"messages": CHAT["messages"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    limits = {
        "max_tokens": len(ANSWER),
        "max_completion_tokens": len(ANSWER),
        "stop": None,
        "ignore_eos": True,
    }
    ask = {**own, **limits, "model": "m", "stream": True, "stream_options": options}
    *lines, _ = events_of(await client.post(f"/v1/{path}", json=ask))
    usages = [json.loads(line)["usage"] for line in lines]
    written = [usage["completion_tokens"] for usage in usages]
    assert written == sorted(written)
    assert written[-2:] == [len(ANSWER)] * 2
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages
    )


async def test_a_suffix_that_says_nothing_is_accepted(client):
    assert (await client.post("/v1/completions", json={**ASK, "suffix": ""})).status_code == 200


@pytest.mark.parametrize(
    ("logprob", "said"), [(math.nan, -9999.0), (-math.inf, -9999.0), (math.inf, 0.0), (-1e300, -9999.0)]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_is_no_number_never_reaches_json(tokenizer, monkeypatch, logprob, said, path, stream):
    entry = generation_pb2.TokenLogprobs(logprob=logprob, token_ids=[65], logprobs=[logprob])
    monkeypatch.setattr(scripted, "_logprobs", lambda token: entry)
    own = {**ASK, "logprobs": 1} if path == "completions" else {**CHAT, "logprobs": True, "top_logprobs": 1}
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        response = await client.post(f"/v1/{path}", json={**own, "stream": stream})
    assert response.status_code == 200
    assert "NaN" not in response.text
    assert "Infinity" not in response.text
    assert f": {said}" in response.text.replace(":", ": ").replace("  ", " ")


async def test_a_model_without_a_chat_template_says_so(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=ChatTemplate(None, {})) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


async def test_an_answer_can_be_sent_back_as_the_message_that_it_was(client):
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]
    messages = [*CHAT["messages"], answer, {"role": "user", "content": [{"type": "text", "text": "y"}]}]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert response.json()["usage"]["prompt_tokens"] == len(f"user:x;assistant:{TEXT};user:y;".encode())


async def test_a_chat_may_use_what_is_left_of_the_context(tokenizer):
    target = ScriptedTarget(ANSWER, finish_reason="stop")
    async with client_of(tokenizer, target) as client:
        await client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})
    assert target.requests[0].open.sampling.max_tokens == MAX_LENGTH - len("user:x;")


async def test_logprobs_of_a_completion(client):
    body = (await client.post("/v1/completions", json={**ASK, "logprobs": 2})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["T", "h", "e"]
    assert logprobs["tokens"][9:11] == ["bytes:\\xc3", "bytes:\\xa4"]
    assert logprobs["token_logprobs"] == [-0.25] * len(ANSWER)
    assert logprobs["top_logprobs"][0] == {"T": -0.25, "U": -9999.0}
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    assert logprobs["text_offset"][-1] == len(TEXT) - 1


@pytest.mark.parametrize("stop", [[], ['"x']], ids=["none", "held back for a stop string"])
async def test_offsets_say_where_each_token_s_text_begins(tokenizer, stop):
    async with client_of(tokenizer, ScriptedTarget(list(b'a"bc'))) as client:
        ask = {"prompt": "x", "max_tokens": 4, "logprobs": 0, "stop": stop, "echo": False}
        body = (await client.post("/v1/completions", json=ask)).json()["choices"][0]
    assert body["text"] == 'a"bc'
    assert body["logprobs"]["text_offset"] == [0, 1, 2, 3]


async def test_logprobs_of_a_chat(client):
    ask = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in whole for byte in token["bytes"]) == TEXT.encode()
    assert [top["token"] for top in whole[0]["top_logprobs"]] == ["T", "U"]
    *events, _ = events_of(await client.post("/v1/chat/completions", json={**ask, "stream": True}))
    parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    assert [token for part in parts if part for token in part["content"]] == whole


async def test_echo_repeats_the_prompt_before_every_choice(client):
    body = (await client.post("/v1/completions", json={**ASK, "echo": True, "n": 2})).json()
    assert [choice["text"] for choice in body["choices"]] == ["x" + TEXT] * 2


@pytest.mark.parametrize(("prompt", "echoed"), [("a<|end|>b", "a<|end|>b"), ([97, 256, 98], "ab")])
async def test_echo_repeats_text_as_it_came_and_decodes_ids(client, prompt, echoed):
    body = (await client.post("/v1/completions", json={**ASK, "prompt": prompt, "echo": True})).json()
    assert body["choices"][0]["text"] == echoed + TEXT


async def test_usage_has_the_record_of_speculation(client):
    usage = (await client.post("/v1/completions", json={**ASK, "seed": 3})).json()["usage"]
    stats = usage["speculation"]
    assert sum(stats["accepted_lengths"]) == stats["rounds"]
    assert stats["mean_accepted_length"] == round(stats["accepted"] / stats["rounds"], 3)
    assert {name: stats[name] for name in ("seed", "fallbacks", "mode", "depth", "verification")} == {
        "seed": 3,
        "fallbacks": 0,
        "mode": "auto",
        "depth": 16,
        "verification": "coupled",
    }


async def test_a_body_that_is_too_long_is_refused_while_it_is_read(tokenizer):
    async def endless():
        while True:
            yield b" " * 1000

    async with client_of(tokenizer, ScriptedTarget(ANSWER), max_message_bytes=5000) as client:
        response = await client.post("/v1/completions", content=endless())
        assert response.status_code == 413
        assert "5000" in response.json()["error"]["message"]


async def test_a_full_queue_says_when_to_come_again(tokenizer):
    silent = ScriptedTarget(ANSWER, lost_at=range(2, 10_000), lost_with=LEAVING)
    async with client_of(tokenizer, silent, max_requests=1, max_waiting=0, request_deadline_s=1.0) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await eventually(lambda: silent.requests)
        response = await client.post("/v1/completions", json=ASK)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert (await waiting).status_code == 504


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/m"])
async def test_a_key_is_needed_where_keys_are_configured(tokenizer, path):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=["secret"]) as client:

        async def status(**headers):
            body = {**ASK} if path == "/v1/completions" else CHAT
            method = client.get if "models" in path else partial(client.post, json=body)
            return (await method(path, headers=headers)).status_code

        assert await status() == await status(Authorization="Bearer wrong") == 401
        assert await status(Authorization="Bearer secret") == 200


async def test_probes_need_no_key_and_learn_nothing_about_workers(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=["secret"]) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        known = await client.get("/health", headers={"Authorization": "Bearer secret"})
        assert [worker["role"] for worker in known.json()["workers"]] == ["target"]


async def test_without_keys_other_machines_are_refused(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), host="10.1.2.3") as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 401


@pytest.mark.parametrize("text", ["a prompt that is secret", ["a prompt that is secret"] * 2])
async def test_what_is_refused_is_not_repeated(client, text):
    wrong = {"prompt": text, "max_tokens": 0, "stop": [text] * 20, "user": text, "task": {"a": text}}
    response = await client.post("/v1/completions", json=wrong)
    assert response.status_code == 400
    assert "secret" not in response.text


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "fixed", "off", "model", "ngram", "coupled", "block", "user", "text", "x", "\ud800"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys())
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


@pytest.mark.parametrize(("path", "base"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
def test_no_body_is_an_error_of_ours(tokenizer, path, base):
    async def check(body):
        async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
            for fields in (body, {**base, **body}):
                content = json.dumps(fields)
                response = await client.post(
                    path, content=content, headers={"content-type": "application/json"}
                )
                assert response.status_code in (200, 400, 404), response.text
                if response.status_code != 200:
                    assert response.json()["error"]["param"]

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
    @given(bodies)
    def run(body):
        asyncio.run(check(body))

    run()


EXTREMES = [
    *(sign * 2**power for sign in (1, -1) for power in (0, 31, 32, 62, 63, 64, 2000)),
    *(0, 0.5, 1e308, math.inf, math.nan, True, "", "\ud800", "\0", [], {}),
    *([None], [-1], [2**63], ["\ud800"], [[]], {"\ud800": 1}, {"1": math.nan}, {str(2**63): 1}, {"role": 1}),
    *({"type": "text"}, [{"role": "user", "content": "\ud800"}], [{"type": "text", "text": "\ud800"}]),
]


@pytest.mark.parametrize(("path", "base"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_no_extreme_of_any_field_is_an_error_of_ours(tokenizer, path, base):
    target, headers = ScriptedTarget(ANSWER), {"content-type": "application/json"}
    async with client_of(tokenizer, target, request_deadline_s=LIMIT_S) as client:
        for field in [*FIELDS, "\ud800", ""]:
            for value in EXTREMES:
                target.requests.clear()
                content = json.dumps({**base, field: value})
                response = await client.post(path, content=content, headers=headers)
                assert response.status_code in (200, 400, 404), (field, value, response.text)
                assert response.status_code == 200 or response.json()["error"]["param"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"NaN",
    ],
    ids=lambda content: repr(content[:12]),
)
async def test_what_is_no_request_at_all_is_the_caller_s_error(client, content):
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ("body" if content != b'{"prompt": "x", "seed": ' else "seed")


async def test_only_json_is_taken(client):
    """A page in a browser may send plain text to a service on its machine without being asked."""
    response = await client.post(
        "/v1/completions", content=json.dumps(ASK), headers={"content-type": "text/plain"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")


async def test_a_defect_is_told_without_its_traceback(tokenizer, monkeypatch):
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


async def test_the_openapi_document_describes_what_is_accepted(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "speculation"} <= schema["properties"].keys()


async def test_an_unknown_path_and_method_are_answered_in_the_same_shape(client):
    for response in (await client.get("/v2"), await client.get("/v1/completions")):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["message"]
        assert response.json()["error"]["param"] is None
