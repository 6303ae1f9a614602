"""Log probabilities over HTTP."""

import json
import math

import pytest

from protos import generation_pb2
from tests.fakes import scripted
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of, events_of


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("logprob", "said"), [(math.nan, -9999.0), (-math.inf, -9999.0), (math.inf, 0.0), (-1e300, -9999.0)]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_not_finite_never_reach_json(tokenizer, monkeypatch, logprob, said, path, stream):
    entry = generation_pb2.TokenLogprobs(logprob=logprob, token_ids=[65], logprobs=[logprob])
    monkeypatch.setattr(scripted, "_logprobs", lambda token: entry)
    own = {**ASK, "logprobs": 1} if path == "completions" else {**CHAT, "logprobs": True, "top_logprobs": 1}
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        response = await client.post(f"/v1/{path}", json={**own, "stream": stream})
    assert response.status_code == 200
    assert "NaN" not in response.text
    assert "Infinity" not in response.text
    assert f": {said}" in response.text.replace(":", ": ").replace("  ", " ")


async def test_completion_logprobs_have_offsets(client):
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


async def test_chat_logprobs_have_tokens_and_bytes(client):
    ask = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in whole for byte in token["bytes"]) == TEXT.encode()
    assert [top["token"] for top in whole[0]["top_logprobs"]] == ["T", "U"]
    *events, _ = events_of(await client.post("/v1/chat/completions", json={**ask, "stream": True}))
    parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    assert [token for part in parts if part for token in part["content"]] == whole
