"""Fields that are not served: passed over and named, refused by name, or as the setting says."""

import pytest

from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of

IGNORED = "outrider-ignored"


@pytest.mark.parametrize(("path", "ask"), [("completions", ASK), ("chat/completions", CHAT)])
async def test_what_cannot_change_the_answer_is_passed_over_and_named(client, path, ask):
    hints = {"user": "u", "store": True, "metadata": {"a": 1}, "service_tier": None}
    for stream in (False, True):
        response = await client.post(f"/v1/{path}", json={**ask, **hints, "stream": stream})
        assert response.status_code == 200
        assert response.headers[IGNORED] == "metadata, store, user"
    assert IGNORED not in (await client.post(f"/v1/{path}", json=ask)).headers


@pytest.mark.parametrize(
    "neutral", [{"best_of": 1, "suffix": ""}, {"use_beam_search": False, "length_penalty": 1.0}], ids=str
)
async def test_what_asks_for_what_is_done_anyway_is_taken(client, neutral):
    response = await client.post("/v1/completions", json={**ASK, **neutral})
    assert response.json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "truncate_prompt_tokens", "documents"])
async def test_what_would_change_the_answer_is_refused_by_name(tokenizer, name):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), unknown_fields="ignore") as client:
        response = await client.post("/v1/completions", json={**ASK, name: [2]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert "would change the answer" in error["message"]


UNKNOWN = {
    **CHAT,
    "max_token": 5,
    "stream_options": {"chunk": 1},
    "messages": [{"role": "user", "content": "x", "mood": "glad"}],
}


async def test_a_field_that_nobody_knows_is_refused(client):
    response = await client.post("/v1/chat/completions", json=UNKNOWN)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "stream_options.chunk")
    assert "unknown_fields=ignore" in error["message"]


async def test_a_field_that_nobody_knows_is_ignored_where_the_setting_says_so(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), unknown_fields="ignore") as client:
        response = await client.post("/v1/chat/completions", json={**UNKNOWN, "user": "u"})
        assert response.json()["choices"][0]["message"]["content"] == TEXT
        assert response.headers[IGNORED] == "max_token, messages.0.mood, stream_options.chunk, user"
        wrong = await client.post("/v1/chat/completions", json={**UNKNOWN, "temperature": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


async def test_a_field_s_name_cannot_add_a_header(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), unknown_fields="ignore") as client:
        response = await client.post("/v1/completions", json={**ASK, "a\r\nset-cookie: x": 1, "é" * 5000: 1})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert response.headers[IGNORED].startswith("a\\r\\nset-cookie: x, ")
    assert len(response.headers[IGNORED]) <= 2048
