"""/v1/responses: a chat in another form, whole and as events; nothing is kept between requests."""

import json

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import ANSWER, TEXT, client_of
from tests.support.service import service_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

PATH = "/v1/responses"
ASK = {"input": "x", "max_output_tokens": len(ANSWER)}
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Zürich"}}</tool_call>'
CALLING = [*f"Look:{CALL}{CALL}".encode(), 256]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def events_of(response):
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def without_ids(response):
    def plain(value):
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            own = {"id", "item_id", "call_id", "created_at", "usage", "metrics", "outrider"}
            return {name: plain(item) for name, item in value.items() if name not in own}
        return value

    return plain(response)


async def test_response_has_output_and_usage(client):
    response = (await client.post(PATH, json=ASK)).json()
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "incomplete")
    assert [part["text"] for part in message["content"]] == [TEXT]
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["usage"]["output_tokens"] == len(ANSWER)
    assert response["store"] is True


async def test_response_events_build_the_response(client):
    whole = (await client.post(PATH, json=ASK)).json()
    events = events_of(await client.post(PATH, json={**ASK, "stream": True}))
    assert [event["type"] for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event["type"] for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert ("".join(deltas), events[-4]["text"]) == (TEXT, TEXT)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[0]["response"]["output"] == []


async def test_calls_are_items_of_their_own(tokenizer):
    target = ScriptedTarget(CALLING, finish_reason="stop")
    async with client_of(tokenizer, target, ScriptedDraft(CALLING), template=TEMPLATE) as client:
        ask = {**ASK, "max_output_tokens": len(CALLING), "tools": [TOOL], "instructions": "Be brief."}
        whole = (await client.post(PATH, json=ask)).json()
        events = events_of(await client.post(PATH, json={**ask, "stream": True}))
        sent = [*whole["output"], {"type": "function_call_output", "call_id": "1", "output": "sunny"}]
        again = await client.post(PATH, json={**ask, "input": [{"role": "user", "content": "x"}, *sent]})
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["status"] == "completed"
    assert [json.loads(item["arguments"]) for item in whole["output"][1:]] == [{"city": "Zürich"}] * 2
    arguments = ""
    for event in events:
        if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == 2:
            arguments += event["delta"]
    assert json.loads(arguments) == {"city": "Zürich"}
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["arguments"] for item in added[1:]] == [""] * 2, "the deltas bring all of them"
    assert {item["status"] for item in added} == {"in_progress"}
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert again.status_code == 200, again.text
    turns = [getattr(request, request.WhichOneof("request")) for request in target.requests]
    told = [list(turn.turn.tokens) for turn in turns if hasattr(turn, "turn") and not turn.turn.base]
    prompts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in told if tokens]
    assert f"<|user|>x<|end|><|assistant|>Look:{CALL}{CALL}<|end|><|tool|>sunny<|end|>" in prompts[-1]
    assert prompts[0].startswith("<|system|>Be brief.\nTools:")


async def test_thinking_is_an_item_of_its_own(tokenizer):
    said = [*b"<think>so</think>Yes."]
    template = ChatTemplate("<think>{{ messages[0].content }}[/INST]", {})
    async with client_of(tokenizer, ScriptedTarget(said), template=template) as client:
        ask = {**ASK, "max_output_tokens": len(said)}
        whole = (await client.post(PATH, json=ask)).json()
        kinds = {event["type"] for event in events_of(await client.post(PATH, json={**ask, "stream": True}))}
    assert [(item["type"], item["content"][0]["text"]) for item in whole["output"]] == [
        ("reasoning", "so"),
        ("message", "Yes."),
    ]
    assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds


async def test_response_follows_its_form():
    schema = {"type": "object", "properties": {"age": {"enum": [7]}}, "required": ["age"]}
    schema["additionalProperties"] = False
    ask = {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
    async with service_of(drafts=0) as service:
        response = (await service.http.post(PATH, json={**ask, "max_output_tokens": 40})).json()
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"age": 7}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"input": "x" * 10_000}, "input"),
        ({"input": []}, "input"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_response_wrong_field_has_the_request_s_own_name(client, wrong, field):
    response = await client.post(PATH, json={**ASK, **wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_response_ignored_field_is_named(client):
    response = await client.post(PATH, json={**ASK, "safety_identifier": "s", "user": "u"})
    assert response.headers["outrider-ignored"] == "safety_identifier, user"
    assert response.headers["outrider-seed"]


async def test_response_stream_that_fails_ends_with_the_failure(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(4, 10_000), lost_with=Cause.FAILED)
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER)) as client:
        ask = {**ASK, "stream": True, "speculation": {"mode": "fixed", "depth": 1}}
        *_, last = events_of(await client.post(PATH, json=ask))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
