"""Responses that are kept: conversations go on from them, for their own caller, within a bound of bytes."""

import json

import openai
import pytest

from gateway.api.openai.chat_template import ChatTemplate
from gateway.generation.answer_store import LocalAnswers
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import bearer, client_of, events_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
ANSWER = [*b"It rains.", 256]
ASK = {"input": "How is the weather?", "instructions": "Be brief.", "max_output_tokens": len(ANSWER)}
PATH = "/v1/responses"
KEYS = ("one", "other")


@pytest.fixture
async def served(tokenizer):
    """Yields a client, and the target that its requests reach."""
    target = ScriptedTarget(ANSWER, finish_reason="stop")
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER), template=TEMPLATE, keys=KEYS) as client:
        client.headers.update(bearer("one"))
        yield client, target


async def asked(client, **more):
    return (await client.post(PATH, json={**ASK, **more})).json()


async def test_conversation_goes_on_from_a_response_without_its_instructions(served):
    client, _ = served
    first = await asked(client)
    second = await asked(client, input="And now?", previous_response_id=first["id"], instructions=None)
    third = await asked(client, input="Sure?", previous_response_id=second["id"], instructions=None)
    assert second["previous_response_id"] == first["id"]
    assert (first["store"], third["status"]) == (True, "completed")
    plain = await client.post(
        "/tokenize",
        json={
            "messages": [
                {"role": role, "content": text}
                for role, text in (
                    ("user", ASK["input"]),
                    ("assistant", "It rains."),
                    ("user", "And now?"),
                    ("assistant", "It rains."),
                    ("user", "Sure?"),
                )
            ]
        },
    )
    assert third["usage"]["input_tokens"] == plain.json()["count"]


async def test_calls_and_their_results_go_on_from_a_response(tokenizer):
    called = [*b'<tool_call>{"name": "now", "arguments": {}}</tool_call>', 256]
    tools = [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]
    workers = ScriptedTarget(called, finish_reason="stop"), ScriptedDraft(called)
    async with client_of(tokenizer, *workers, template=TEMPLATE) as client:
        ask = {"tools": tools, "max_output_tokens": len(called)}
        first = await asked(client, **ask)
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        second = await asked(client, **ask, input=[result], previous_response_id=first["id"])
    assert call["name"] == "now"
    assert second["status"] == "completed"


async def test_streamed_response_is_kept_before_its_last_event(served):
    client, _ = served
    answer = await client.post(PATH, json={**ASK, "stream": True})
    last = json.loads(events_of(answer)[-1].partition("data: ")[2])
    assert last["type"] == "response.completed"
    kept = await client.get(f"{PATH}/{last['response']['id']}")
    assert kept.json() == last["response"]


async def test_kept_response_is_found_by_its_own_caller_alone(served):
    client, _ = served
    response = await asked(client)
    path = f"{PATH}/{response['id']}"
    assert (await client.get(path)).json() == response
    assert (await client.get(path, headers=bearer("other"))).status_code == 404
    ask = {**ASK, "previous_response_id": response["id"]}
    refused = await client.post(PATH, json=ask, headers=bearer("other"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_deleted_response_is_not_found_again(served):
    client, _ = served
    path = f"{PATH}/{(await asked(client))['id']}"
    assert (await client.delete(path)).json()["deleted"] is True
    assert (await client.delete(path)).status_code == 404
    refused = await client.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, None)


async def test_response_is_not_kept_if_the_request_says_so(served):
    client, _ = served
    response = await asked(client, store=False)
    assert response["store"] is False
    assert (await client.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_response_is_not_kept_if_the_service_keeps_none(tokenizer):
    workers = ScriptedTarget(ANSWER, finish_reason="stop"), ScriptedDraft(ANSWER)
    async with client_of(tokenizer, *workers, template=TEMPLATE, stored_answer_bytes=0) as client:
        assert (await asked(client))["store"] is False


async def test_input_items_of_a_response_come_newest_first(served):
    client, _ = served
    items = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    response = await asked(client, input=items)
    listed = (await client.get(f"{PATH}/{response['id']}/input_items")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["b", "a"]


async def test_cancel_says_that_nothing_runs_in_the_background(served):
    client, _ = served
    answer = await client.post(f"{PATH}/{(await asked(client))['id']}/cancel")
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]


async def test_openai_client_goes_on_retrieves_and_deletes(served):
    http, _ = served
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="one", http_client=http, max_retries=0
    )
    ask = {"model": "m", "max_output_tokens": len(ANSWER)}
    first = await client.responses.create(input="x", **ask)
    second = await client.responses.create(input="y", previous_response_id=first.id, **ask)
    assert (await client.responses.retrieve(second.id)).output_text == "It rains."
    assert [item.role async for item in client.responses.input_items.list(second.id)] == ["user"]
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)


async def test_store_drops_the_oldest_entries_beyond_its_bytes():
    store = LocalAnswers(10)
    for name in "abc":
        await store.put("caller", name, b"1234")
    assert await store.get("caller", "a") is None
    assert await store.get("caller", "b") == await store.get("caller", "c") == b"1234"
    await store.put("caller", "d", b"12345678901")
    assert await store.get("caller", "d") is None
    assert await store.delete("caller", "b") is True
    await store.put("caller", "e", b"123456")
    assert await store.get("caller", "c") == b"1234"
