"""Chats over HTTP."""

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from tests.fakes.scripted import MAX_LENGTH, ScriptedTarget
from tests.support.http_calls import ANSWER, CHAT, TEXT, client_of


async def test_chat_completion_has_message_and_usage(tokenizer):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert bytes(target.requests[1].decode.turn.tokens) == b"user:x;"


async def test_chat_neutral_fields_of_openai_are_accepted(client):
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
        {"messages": [{"role": "user", "content": "x", "annotations": [], "tool_calls": []}]},
    ],
    ids=str,
)
async def test_hints_and_labels_of_a_chat_change_nothing(client, harmless):
    response = await client.post("/v1/chat/completions", json={**CHAT, **harmless})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == TEXT


async def test_chat_model_without_a_template_is_refused(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=ChatTemplate(None, {})) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


async def test_chat_answer_is_accepted_as_a_message(client):
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]
    messages = [*CHAT["messages"], answer, {"role": "user", "content": [{"type": "text", "text": "y"}]}]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert response.json()["usage"]["prompt_tokens"] == len(f"user:x;assistant:{TEXT};user:y;".encode())


async def test_chat_without_max_tokens_may_fill_the_context(tokenizer):
    target = ScriptedTarget(ANSWER, finish_reason="stop")
    async with client_of(tokenizer, target) as client:
        await client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})
    assert target.requests[0].open.sampling.max_tokens == MAX_LENGTH - len("user:x;")
