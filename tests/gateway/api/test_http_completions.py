"""Completions over HTTP."""

import json
import re

import pytest

from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of


async def test_completion_has_text_and_usage(client):
    response = await client.post("/v1/completions", json={**ASK, "seed": 4})
    body = response.json()
    assert body["object"] == "text_completion"
    ended = {"finish_reason": "length", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, **ended}]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, len(ANSWER))
    stats = usage["speculation"]
    assert stats["drafted"] > stats["accepted"] > 0
    assert stats["seed"] == 4
    assert response.headers["outrider-seed"] == "4"


@pytest.mark.parametrize(("path", "ask"), [("completions", ASK), ("chat/completions", CHAT)])
async def test_answer_and_all_its_events_have_the_fingerprint_of_the_target(client, path, ask):
    whole = (await client.post(f"/v1/{path}", json=ask)).json()
    streamed = await client.post(f"/v1/{path}", json={**ask, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert re.fullmatch(r"outrider-[\d.]+-[0-9a-f]{8}", whole["system_fingerprint"])
    assert {event["system_fingerprint"] for event in events} == {whole["system_fingerprint"]}


async def test_completion_null_and_neutral_fields_are_accepted(client):
    ask = {**ASK, "n": 1, "best_of": 1, "echo": False, "suffix": None, "user": "u", "temperature": None}
    response = await client.post("/v1/completions", json={**ask, "stop": None, "logit_bias": {"3": -1}})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_max_completion_tokens_wins_over_max_tokens(client, path):
    own = ASK if path == "completions" else CHAT
    body = (await client.post(f"/v1/{path}", json={**own, "max_completion_tokens": 3})).json()
    assert body["usage"]["completion_tokens"] == 3


async def text_of(client, path, **more):
    """Returns the text of an answer. path: completions or chat/completions."""
    own = ASK if path == "completions" else CHAT
    (choice,) = (await client.post(f"/v1/{path}", json={**own, **more})).json()["choices"]
    return choice["text"] if path == "completions" else choice["message"]["content"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_stop_string_is_in_the_text_if_asked(client, path):
    told = [
        await text_of(client, path, stop=[" sät"], include_stop_str_in_output=is_kept)
        for is_kept in (False, True)
    ]
    assert told == ["The cat", "The cat sät"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_special_tokens_are_in_the_text_if_asked(tokenizer, path):
    async with client_of(tokenizer, ScriptedTarget([*b"Yes.", 256], finish_reason="stop")) as client:
        told = [await text_of(client, path, skip_special_tokens=skips) for skips in (True, False)]
    assert told == ["Yes.", "Yes.<|end|>"]


@pytest.mark.parametrize(("seed", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (7, 7)])
async def test_completion_negative_seed_is_told_as_it_came(tokenizer, seed, used):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        response = await client.post("/v1/completions", json={**ASK, "seed": seed})
    assert target.requests[0].open.sampling.seed == used
    assert response.headers["outrider-seed"] == str(seed)
    assert response.json()["usage"]["speculation"]["seed"] == seed


async def test_completion_empty_suffix_is_accepted(client):
    assert (await client.post("/v1/completions", json={**ASK, "suffix": ""})).status_code == 200


async def test_echo_repeats_the_prompt_before_every_choice(client):
    body = (await client.post("/v1/completions", json={**ASK, "echo": True, "n": 2})).json()
    assert [choice["text"] for choice in body["choices"]] == ["x" + TEXT] * 2


@pytest.mark.parametrize(("prompt", "echoed"), [("a<|end|>b", "a<|end|>b"), ([97, 256, 98], "ab")])
async def test_echo_repeats_text_as_it_came_and_decodes_ids(client, prompt, echoed):
    body = (await client.post("/v1/completions", json={**ASK, "prompt": prompt, "echo": True})).json()
    assert body["choices"][0]["text"] == echoed + TEXT


async def test_usage_has_five_counters_of_speculation_by_default(client):
    answer = (await client.post("/v1/completions", json={**ASK, "seed": 3})).json()
    assert answer["usage"]["speculation"].keys() == {"target_passes", "rounds", "drafted", "accepted", "seed"}
    assert "metrics" not in answer


async def test_usage_with_a_report_has_all_counters_of_speculation(client):
    ask = {**ASK, "seed": 3, "speculation": {"report": True}}
    usage = (await client.post("/v1/completions", json=ask)).json()["usage"]
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
