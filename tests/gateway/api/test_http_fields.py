"""Fields that are not served: ignored and named, refused by name, or decided by the setting."""

import pytest

from gateway.api.endpoints import CHATS, COMPLETIONS, ENDPOINTS
from gateway.api.openai.field_types import NOT_READ
from gateway.api.openai.fields import UNSERVED
from gateway.api.openai.response_api import RESPONSES
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of

IGNORED = "outrider-ignored"


@pytest.mark.parametrize(("path", "ask"), [("completions", ASK), ("chat/completions", CHAT)])
async def test_field_without_effect_is_ignored_and_named(client, path, ask):
    hints = {"user": "u", "metadata": {"a": 1}, "service_tier": None}
    for stream in (False, True):
        response = await client.post(f"/v1/{path}", json={**ask, **hints, "stream": stream})
        assert response.status_code == 200
        assert response.headers[IGNORED] == "metadata, user"
    assert IGNORED not in (await client.post(f"/v1/{path}", json=ask)).headers


@pytest.mark.parametrize(
    "neutral", [{"best_of": 1, "suffix": ""}, {"use_beam_search": False, "length_penalty": 1.0}], ids=str
)
async def test_field_with_its_neutral_value_is_accepted(client, neutral):
    response = await client.post("/v1/completions", json={**ASK, **neutral})
    assert response.json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("name", ["use_beam_search", "prompt_embeds", "documents"])
async def test_field_that_changes_the_answer_is_refused_by_name(tokenizer, name):
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


async def test_field_unknown_is_refused(client):
    response = await client.post("/v1/chat/completions", json=UNKNOWN)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "stream_options.chunk")
    assert "unknown_fields=ignore" in error["message"]


async def test_field_unknown_is_ignored_if_the_setting_says_so(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), unknown_fields="ignore") as client:
        response = await client.post("/v1/chat/completions", json={**UNKNOWN, "user": "u"})
        assert response.json()["choices"][0]["message"]["content"] == TEXT
        assert response.headers[IGNORED] == "max_token, messages.0.mood, stream_options.chunk, user"
        wrong = await client.post("/v1/chat/completions", json={**UNKNOWN, "temperature": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


async def test_field_name_cannot_add_a_header(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), unknown_fields="ignore") as client:
        response = await client.post("/v1/completions", json={**ASK, "a\r\nset-cookie: x": 1, "é" * 5000: 1})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert response.headers[IGNORED].startswith("a\\r\\nset-cookie: x, ")
    assert len(response.headers[IGNORED]) <= 2048


CONTRADICTED = {
    "of another endpoint": ("chat/completions", {"max_output_tokens": 2}),
    "of a chat": ("completions", {"tools": [{"type": "function"}]}),
    "of a conversation that is kept": ("responses", {"conversation": "conv_1"}),
    "of OpenAI's prompts": ("responses", {"prompt": {"id": "pmpt_1"}}),
    "of vLLM": ("completions", {"bad_words": ["cat"]}),
    "of SGLang": ("completions", {"regex": "[0-9]+"}),
    "of llama.cpp": ("completions", {"grammar": "root ::= [0-9]"}),
    "of TGI": ("completions", {"max_new_tokens": 5}),
}
BODIES = {"completions": ASK, "chat/completions": CHAT, "responses": {"input": "x"}}


@pytest.mark.parametrize("case", CONTRADICTED)
async def test_field_that_changes_the_answer_is_refused_though_unknown_ones_are_ignored(tokenizer, case):
    path, fields = CONTRADICTED[case]
    async with client_of(tokenizer, ScriptedTarget(ANSWER), unknown_fields="ignore") as client:
        response = await client.post(f"/v1/{path}", json={**BODIES[path], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, next(iter(fields)))
    assert "would change the answer" in error["message"]


def test_field_that_one_endpoint_serves_is_served_or_refused_by_the_others():
    models = {path: ENDPOINTS[path].request.model_fields for path in (COMPLETIONS, CHATS, RESPONSES)}
    read = {
        name for model in models.values() for name, field in model.items() if field.description != NOT_READ
    }
    for path, model in models.items():
        assert sorted(read - model.keys() - UNSERVED.keys()) == [], path


async def test_field_of_tokenize_reaches_it(tokenizer):
    """Other endpoints refuse the field."""
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        ask = {"messages": CHAT["messages"], "add_generation_prompt": False, "add_special_tokens": False}
        response = await client.post("/tokenize", json=ask)
    assert response.json()["count"] == len("user:x;")
