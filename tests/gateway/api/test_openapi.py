"""Bodies, events, errors and headers match the OpenAPI description and have nothing else."""

import asyncio
import json
import re

import jsonschema  # type: ignore[import-untyped]
import pytest

from gateway.api.anthropic.message_api import COUNT_TOKENS, MESSAGES
from gateway.api.endpoints import CHATS, COMPLETIONS, ENDPOINTS
from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.response_api import RESPONSES
from gateway.api.text_api import DETOKENIZE, TOKENIZE
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, client_of
from tests.support.service import service_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALLING = [*b'Look:<tool_call>{"name": "f", "arguments": {"city": 7}}</tool_call>', 256]
CALLS = {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": len(CALLING)}
RESPONSE = {"input": "x", "max_output_tokens": len(ANSWER)}
RESPONSE_CALLS = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": len(CALLING)}
MESSAGE = {"model": "m", "messages": CHAT["messages"], "max_tokens": len(ANSWER)}
MESSAGE_CALLS = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": len(CALLING)}
OPTIONS = {"include_usage": True, "include_rounds": True, "continuous_usage_stats": True}
DRAFTED = {"speculation": {"mode": "fixed", "depth": 4, "report": True}}


class Description:
    """Description of a service in which objects have only the properties that it names."""

    def __init__(self, document):
        self.document = _closed(document)

    def schema(self, path, status=200, content="application/json"):
        (operation,) = self.document["paths"][path].values()
        return operation["responses"][str(status)]["content"][content]["schema"]

    def body(self, path):
        return self.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    def check(self, value, schema):
        components = {"components": self.document["components"]}
        jsonschema.Draft202012Validator({**schema, **components}).validate(value)

    def check_headers(self, response, path):
        (operation,) = self.document["paths"][path].values()
        described = operation["responses"][str(response.status_code)]["headers"]
        own = {name for name in response.headers if name.startswith(("outrider-", "x-", "retry-"))}
        assert own <= {name.lower() for name in described}


def _closed(part):
    if isinstance(part, list):
        return [_closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    closed = {name: _closed(item) for name, item in part.items()}
    if part.get("type") == "object" and "properties" in part:
        closed.setdefault("additionalProperties", False)
    return closed


async def described(client):
    return Description((await client.get("/openapi.json")).json())


async def events_of(client, path, ask):
    response = await client.post(path, json={**ask, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(event) for event in data if event != "[DONE]"]


async def test_openapi_paths_are_described_in_words(client):
    document = (await client.get("/openapi.json")).json()
    assert document["paths"].keys() == {name.rpartition(" ")[2] for name in ENDPOINTS}
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all(operation.get("description") for operation in operations)
    assert document["info"]["version"]


async def test_openapi_references_exist_and_are_used(client):
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    referred = {reference.rpartition("/")[2] for reference in references(document)}
    assert referred == schemas.keys()


def references(part):
    if isinstance(part, list):
        return [reference for item in part for reference in references(item)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [reference for item in part.values() for reference in references(item)]


BODIES = {
    COMPLETIONS: {**ASK, **DRAFTED},
    CHATS: {**CHAT, **CALLS, "tool_choice": "required"},
    RESPONSES: {**RESPONSE, **RESPONSE_CALLS, "instructions": "Be brief."},
    MESSAGES: {**MESSAGE, **MESSAGE_CALLS, "tool_choice": {"type": "any"}, "system": "Be brief."},
    COUNT_TOKENS: {"model": "m", "messages": CHAT["messages"]},
    TOKENIZE: {"messages": CHAT["messages"]},
    DETOKENIZE: {"tokens": [1]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_openapi_body_is_described_as_it_is_accepted(client, path):
    description = await described(client)
    description.check(BODIES[path], description.body(path))
    with pytest.raises(jsonschema.ValidationError):
        description.check({**BODIES[path], "unheard_of": 1}, description.body(path))


ANSWERED = {
    "a completion": (COMPLETIONS, ASK),
    "several, echoed, with log-probabilities": (
        COMPLETIONS,
        {**ASK, "prompt": ["ab", "cd"], "n": 2, "echo": True, "logprobs": 2, "user": "u"},
    ),
    "a chat": (CHATS, {**CHAT, **DRAFTED}),
    "with log-probabilities": (CHATS, {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "a response": (RESPONSES, RESPONSE),
    "a message": (MESSAGES, MESSAGE),
}


@pytest.mark.parametrize("case", ANSWERED)
async def test_openapi_answer_matches_its_description(client, case):
    path, ask = ANSWERED[case]
    description = await described(client)
    response = await client.post(path, json=ask)
    description.check(response.json(), description.schema(path))
    description.check_headers(response, path)
    options = {} if path in (RESPONSES, MESSAGES) else {"stream_options": OPTIONS}
    for event in await events_of(client, path, {**ask, **options}):
        description.check(event, description.schema(path, content="text/event-stream"))


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        (CHATS, {**CHAT, **CALLS}),
        (RESPONSES, {**RESPONSE, **RESPONSE_CALLS}),
        (MESSAGES, {**MESSAGE, **MESSAGE_CALLS}),
    ],
)
async def test_calls_are_as_they_are_described(tokenizer, path, ask):
    workers = ScriptedTarget(CALLING, finish_reason="stop"), ScriptedDraft(CALLING)
    async with client_of(tokenizer, *workers, template=TEMPLATE) as client:
        description = await described(client)
        answer = (await client.post(path, json=ask)).json()
        assert {"function", "tool_use"} & {*re.findall(r"\w+", json.dumps(answer))}
        description.check(answer, description.schema(path))
        for event in await events_of(client, path, ask):
            description.check(event, description.schema(path, content="text/event-stream"))


@pytest.mark.parametrize(("path", "ask"), [(CHATS, CHAT), (RESPONSES, RESPONSE), (MESSAGES, MESSAGE)])
async def test_thoughts_are_as_they_are_described(tokenizer, path, ask):
    said = [*b"<think>so</think>Yes."]
    template = ChatTemplate("<think>{{ messages[0].content }}[/INST]", {})
    async with client_of(tokenizer, ScriptedTarget(said), template=template) as client:
        description = await described(client)
        answer = (await client.post(path, json=ask)).json()
        assert "reasoning" in json.dumps(answer) or answer["content"][0]["type"] == "thinking"
        description.check(answer, description.schema(path))
        for event in await events_of(client, path, ask):
            description.check(event, description.schema(path, content="text/event-stream"))


@pytest.mark.parametrize(("path", "ask"), [(COMPLETIONS, ASK), (RESPONSES, RESPONSE), (MESSAGES, MESSAGE)])
async def test_openapi_failed_stream_matches_its_description(tokenizer, path, ask):
    target = ScriptedTarget(ANSWER, lost_at=range(4, 10_000), lost_with=Cause.FAILED)
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER)) as client:
        description = await described(client)
        events = await events_of(client, path, {**ask, "speculation": {"mode": "fixed", "depth": 1}})
        assert "error" in json.dumps(events[-1])
        for event in events:
            description.check(event, description.schema(path, content="text/event-stream"))


@pytest.mark.slow
async def test_openapi_answer_of_real_engines_matches_its_description():
    async with service_of() as service:
        description = await described(service.http)
        form = {"response_format": {"type": "json_object"}, "max_tokens": 30}
        for path, ask in {COMPLETIONS: {**ASK, **form}, CHATS: {**CHAT, **form}}.items():
            answer = await service.http.post(path, json={**ask, **DRAFTED})
            description.check(answer.json(), description.schema(path))
        for path in ("/v1/models", "/health", "/loads", "/version"):
            description.check((await service.http.get(path)).json(), description.schema(path))
        model = await service.http.get("/v1/models/m")
        description.check(model.json(), description.schema("/v1/models/{name}"))
        asked = {"prompt": "x", "return_token_strs": True}
        told = (await service.http.post(TOKENIZE, json=asked)).json()
        description.check(told, description.schema(TOKENIZE))
        told = (await service.http.post(DETOKENIZE, json={"tokens": told["tokens"]})).json()
        description.check(told, description.schema(DETOKENIZE))


async def slow():
    """A body that does not end."""
    yield b"{"
    await asyncio.Event().wait()


REFUSED = {
    400: {"ask": {"temperature": -1}},
    401: {"keys": ["k"]},
    404: {"ask": {"model": "other"}},
    408: {"limits": {"body_timeout_s": 0.01}, "content": slow},
    413: {"ask": {"prompt": "x" * 300}, "limits": {"max_message_bytes": 256}},
    429: {"limits": {"max_requests": 1, "max_waiting": 0}, "at once": 2},
    500: {"target": {"lost_at": range(10_000), "lost_with": Cause.FAILED}},
    503: {"without": True},
    504: {"target": {"step_s": 0.2}, "limits": {"request_deadline_s": 0.05}},
}


@pytest.mark.parametrize("status", REFUSED)
async def test_openapi_refusal_matches_its_description(tokenizer, status):
    case = REFUSED[status]
    target = None if "without" in case else ScriptedTarget(ANSWER, **case.get("target", {}))
    limits, ask = case.get("limits", {}), {**ASK, **case.get("ask", {})}
    async with client_of(tokenizer, target, keys=case.get("keys", ()), **limits) as client:
        content = case["content"]() if "content" in case else json.dumps(ask)
        headers = {"content-type": "application/json"}
        asking = [
            client.post(COMPLETIONS, content=content, headers=headers) for _ in range(case.get("at once", 1))
        ]
        response = max(await asyncio.gather(*asking), key=lambda response: response.status_code)
        assert response.status_code == status, response.text
        description = await described(client)
    description.check(response.json(), description.schema(COMPLETIONS, status))
    description.check_headers(response, COMPLETIONS)
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_health_and_ping_without_a_target_answer_as_described(tokenizer):
    async with client_of(tokenizer, None) as client:
        description = await described(client)
        response = await client.get("/health")
        assert (await client.get("/ping")).status_code == 503
    assert response.status_code == 503
    description.check(response.json(), description.schema("/health", 503))
