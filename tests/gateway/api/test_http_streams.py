"""Streamed answers over HTTP."""

import json

import pytest

from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of, events_of


async def test_stream_pieces_make_the_completion(client):
    response = await client.post("/v1/completions", json={**ASK, "stream": True})
    *events, done = events_of(response)
    chunks = [json.loads(event) for event in events]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert str(chunks[0]["outrider"]["seed"]) == response.headers["outrider-seed"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_stream_with_include_usage_ends_with_usage(client):
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = events_of(await client.post("/v1/completions", json=ask))
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["completion_tokens"] == len(ANSWER)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_stream_with_include_rounds_tells_origins_and_rounds(client, path):
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


async def test_stream_failure_is_an_event(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(5, 10_000))
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER)) as client:
        events = events_of(await client.post("/v1/completions", json={**ASK, "stream": True}))
    assert "lost by the script" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"


async def test_chat_stream_begins_with_the_role(client):
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


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_stream_with_continuous_usage_stats_has_usage_in_every_event(client, path):
    """GuideLLM sends this request."""
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
