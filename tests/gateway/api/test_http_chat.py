"""Chats over HTTP."""

from types import SimpleNamespace

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from gateway.generation.request import Prepared
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


async def test_chat_continues_its_last_message_on_request(tokenizer):
    chat = [*CHAT["messages"], {"role": "assistant", "content": "So"}]
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target) as client:
        ask = {**CHAT, "messages": chat, "continue_final_message": True, "add_generation_prompt": False}
        body = (await client.post("/v1/chat/completions", json=ask)).json()
    assert bytes(target.requests[1].decode.turn.tokens) == b"user:x;assistant:So"
    assert body["choices"][0]["message"]["content"] == TEXT


async def test_chat_that_is_continued_and_begun_is_refused(client):
    ask = {**CHAT, "continue_final_message": True, "add_generation_prompt": True}
    response = await client.post("/v1/chat/completions", json=ask)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


async def test_usage_of_several_answers_counts_what_was_cached_before_the_request(tokenizer):
    """The first of them computes the prompt, and the rest find it."""
    prepared = SimpleNamespace(
        sequences=[SimpleNamespace(cached_tokens=count) for count in (16, 0, 16, 4, 8, 8)], n=3
    )
    assert Prepared.cached_tokens.fget(prepared) == 0 + 4


async def test_usage_tells_prompt_tokens_that_were_cached(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER, cached_tokens=5)) as client:
        for path in ("completions", "chat/completions"):
            ask = {"completions": {"prompt": "x" * 9, "max_tokens": 4}, "chat/completions": CHAT}[path]
            usage = (await client.post(f"/v1/{path}", json=ask)).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
        usage = (await client.post("/v1/responses", json={"input": "x"})).json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 5}


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
