"""What clients of other servers send: HEAD, packed bodies, pages of other sites, their neutral values."""

import gzip
import json

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from outrider.decoding.grammar import compiled, token_table
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import client_of, events_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
ANSWER = [*b"It rains.", 256]
ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10}
TEXT = {"prompt": "x", "max_tokens": 3}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def asked(tokenizer):
    """Yields a client, and the target that its requests reach."""
    target = ScriptedTarget(ANSWER, finish_reason="stop")
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER), template=TEMPLATE) as client:
        yield client, target


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/ping"])
async def test_head_answers_with_the_status_of_get(asked, path):
    client, _ = asked
    assert (await client.head(path)).status_code == (await client.get(path)).status_code == 200


async def test_body_in_gzip_is_read(asked):
    client, _ = asked
    packed = gzip.compress(json.dumps(TEXT).encode())
    answer = await client.post(
        "/v1/completions", content=packed, headers={**JSON, "Content-Encoding": "gzip"}
    )
    assert answer.json()["choices"][0]["text"] == "It "


@pytest.mark.parametrize(
    ("content", "packing", "status"),
    [
        (gzip.compress(b" " * 2**23), "gzip", 413),
        (gzip.compress(json.dumps(TEXT).encode())[:-9], "gzip", 400),
        (b'{"prompt": "x"}', "gzip", 400),
        (b'{"prompt": "x"}', "br", 415),
    ],
    ids=["too long", "cut off", "not packed", "another packing"],
)
async def test_body_that_cannot_be_unpacked_is_refused(asked, content, packing, status):
    client, _ = asked
    headers = {**JSON, "Content-Encoding": packing}
    assert (await client.post("/v1/completions", content=content, headers=headers)).status_code == status


ORIGIN = "https://chat.example.org"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}


async def test_pages_of_allowed_origins_may_ask(tokenizer):
    target = ScriptedTarget(ANSWER, finish_reason="stop")
    settings = {"allowed_origins": (ORIGIN,)}
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER), template=TEMPLATE, **settings) as client:
        allowed = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await client.post("/v1/chat/completions", json=ASK, headers={"Origin": ORIGIN})
        other = {**PREFLIGHT, "Origin": "https://other.example.org"}
        refused = await client.options("/v1/chat/completions", headers=other)
    assert allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert answer.status_code == 200
    assert "outrider-seed" in answer.headers["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Origin" not in refused.headers


async def test_pages_of_other_sites_are_not_told_that_they_may_ask(asked):
    client, _ = asked
    answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("more", [{"top_k": -1}, {"top_p": 0}, {"best_of": 2, "n": 2}], ids=str)
async def test_neutral_values_of_other_servers_are_accepted(asked, more):
    client, _ = asked
    assert (await client.post("/v1/completions", json={**TEXT, **more})).status_code == 200


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"best_of": 3}, "best_of"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ],
)
async def test_values_that_would_change_the_answer_are_refused(asked, more, field):
    client, _ = asked
    answer = await client.post("/v1/completions", json={**TEXT, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/chat/completions", {**ASK, "messages": [{"role": "user", "content": "x" * 10**5}]}),
        ("/v1/completions", {**TEXT, "max_tokens": 10**6}),
        ("/v1/completions", {**TEXT, "prompt": [1] * 5000}),
    ],
    ids=["text", "answer", "token ids"],
)
async def test_request_longer_than_the_context_has_the_code_that_clients_look_for(asked, path, ask):
    client, _ = asked
    error = (await client.post(path, json=ask)).json()["error"]
    assert error["code"] == "context_length_exceeded"


async def test_events_have_null_for_usage_that_comes_later(asked):
    client, _ = asked
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    *events, _ = events_of(await client.post("/v1/chat/completions", json=ask))
    usages = [json.loads(event)["usage"] for event in events]
    assert usages[:-1] == [None] * (len(events) - 1)
    assert usages[-1]["completion_tokens"] == len(ANSWER)


async def test_tokens_of_a_chat_are_counted_with_its_tools(asked):
    client, _ = asked
    plain = {"messages": ASK["messages"]}
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    count = (await client.post("/tokenize", json=plain)).json()["count"]
    more = (await client.post("/tokenize", json={**plain, "tools": tools})).json()
    assert more["count"] > count + len("get_weather")


SCHEMAS = {
    "overlapping alternatives": ({"oneOf": [{"type": "integer"}, {"const": 7}]}, "7"),
    "names of properties": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        '{"a": 1}',
    ),
    "unknown format": ({"type": "array", "items": {"type": "string", "format": "password"}}, '["a"]'),
}


OBJECT = {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORMS = {
    **{
        name: ({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, said)
        for name, (schema, said) in SCHEMAS.items()
    },
    "no name": ({"type": "json_schema", "json_schema": {"schema": {"const": 7}}}, "7"),
    "schema of an object": ({"type": "json_object", "schema": OBJECT}, '{"a": 1}'),
}


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", FORMS)
async def test_schemas_that_clients_send_are_followed(asked, tokenizer, name):
    client, target = asked
    form, said = FORMS[name]
    assert (
        await client.post("/v1/chat/completions", json={**ASK, "response_format": form})
    ).status_code == 200
    table = token_table(tokenizer.to_str(), tokenizer.get_vocab_size(), [256])
    grammar = target.requests[0].open.sampling.grammar
    matcher = compiled(grammar, table)
    assert matcher.try_consume_tokens(list(said.encode())) == len(said.encode())
    assert matcher.is_accepting()
    wrong = [*b'{"b": ""}']
    assert compiled(grammar, table).try_consume_tokens(wrong) < len(wrong)


async def test_schema_that_drafts_read_differently_is_refused(asked):
    client, _ = asked
    schema = {"$defs": {"a": {"type": "integer"}}, "properties": {"x": {"$id": "u:x", "$ref": "#/$defs/a"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = await client.post("/v1/chat/completions", json={**ASK, "response_format": form})
    assert answer.status_code == 400
    assert "$id beside $ref" in answer.json()["error"]["message"]


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("rain", "snow")]


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("mode", "said", "is_held"),
    [
        ("auto", "It rains.", True),
        ("required", "It rains.", False),
        ("auto", '<tool_call>{"name": "rain", "arguments": {}}</tool_call>', True),
        ("required", '<tool_call>{"name": "rain", "arguments": {}}</tool_call>', True),
        ("auto", '<tool_call>{"name": "snow", "arguments": {}}</tool_call>', False),
    ],
)
async def test_allowed_tools_alone_may_be_called_of_those_that_are_offered(
    asked, tokenizer, mode, said, is_held
):
    client, target = asked
    ask = {**ASK, "tools": TOOLS, "tool_choice": allowed(mode, "rain")}
    assert (await client.post("/v1/chat/completions", json=ask)).status_code == 200
    table = token_table(tokenizer.to_str(), tokenizer.get_vocab_size(), [256])
    matcher = compiled(target.requests[0].open.sampling.grammar, table)
    ids = tokenizer.encode(said, add_special_tokens=False).ids
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_held


async def test_allowed_tool_that_is_not_offered_is_refused(asked):
    client, _ = asked
    ask = {**ASK, "tools": TOOLS, "tool_choice": allowed("auto", "hail")}
    answer = await client.post("/v1/chat/completions", json=ask)
    assert answer.json()["error"]["param"] == "tool_choice.allowed_tools.tools"


@pytest.mark.parametrize("shows", [True, False])
async def test_thoughts_are_left_out_if_the_request_says_so(tokenizer, shows):
    answer = [*b"<think>hm</think>\n\nIt rains.", 256]
    template = ChatTemplate(CHAT_TEMPLATE + "{# <think> #}", {})
    workers = ScriptedTarget(answer, finish_reason="stop"), ScriptedDraft(answer)
    async with client_of(tokenizer, *workers, template=template) as client:
        ask = {**ASK, "max_tokens": len(answer), "include_reasoning": shows}
        message = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]["message"]
    assert message["content"] == "It rains."
    for name in ("reasoning_content", "reasoning"):
        assert message.get(name) == ("hm" if shows else None)


async def test_thoughts_are_streamed_under_both_names(tokenizer):
    answer = [*b"<think>hm</think>\n\nIt rains.", 256]
    template = ChatTemplate(CHAT_TEMPLATE + "{# <think> #}", {})
    workers = ScriptedTarget(answer, finish_reason="stop"), ScriptedDraft(answer)
    async with client_of(tokenizer, *workers, template=template) as client:
        ask = {**ASK, "max_tokens": len(answer), "stream": True}
        events = events_of(await client.post("/v1/chat/completions", json=ask))
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == "hm"
