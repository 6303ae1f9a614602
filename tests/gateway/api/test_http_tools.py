"""Tools over HTTP: offered by the template, called in the answer, whole and streamed."""

import json
from contextlib import asynccontextmanager
from copy import deepcopy

import pytest

from gateway.api.openai.chat_template import ChatTemplate
from outrider.decoding.grammar import compiled, token_table
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import client_of, events_of
from tests.support.service import service_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from workshop.demo.facts import CITIES
from workshop.demo.tools import TOOLS

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
)
ANSWER = [*CALLS.encode(), 256]  # special token at the end, which the template needs
ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(ANSWER), "tools": [WEATHER]}
TOLD = [("get_weather", {"city": "Zürich"}), ("get_weather", {"city": "Rome"})]


@asynccontextmanager
async def calling(tokenizer, answer=ANSWER, **settings):
    target = ScriptedTarget(answer, finish_reason="stop")
    workers = target, ScriptedDraft(answer, wrong=[7, 30, 31])
    async with client_of(tokenizer, *workers, template=TEMPLATE, **settings) as client:
        yield client, target


def prompt_of(tokenizer, target):
    turns = (getattr(request, request.WhichOneof("request")).turn for request in target.requests[1:])
    return tokenizer.decode(list(next(turns).tokens), skip_special_tokens=False)


def read(calls):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


async def test_tools_whole_answer_has_its_calls(tokenizer):
    async with calling(tokenizer) as (client, target):
        choice = (await client.post("/v1/chat/completions", json=ASK)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert read(choice["message"]["tool_calls"]) == TOLD
    prompt = prompt_of(tokenizer, target)
    assert prompt.startswith(
        '<|system|>Tools:\n{"name": "get_weather", "description": "The weather in a city."'
    )
    assert prompt.endswith("<|user|>x<|end|><|assistant|>")


async def test_calls_are_streamed_as_deltas_of_their_arguments(tokenizer):
    async with calling(tokenizer) as (client, _):
        *events, _ = events_of(await client.post("/v1/chat/completions", json={**ASK, "stream": True}))
    choices = [json.loads(event)["choices"][0] for event in events]
    parts = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    arguments = {0: "", 1: ""}
    for part in parts:
        arguments[part["index"]] += part["function"]["arguments"]
    assert [json.loads(text) for text in arguments.values()] == [{"city": "Zürich"}, {"city": "Rome"}]
    assert len(parts) > 6
    assert [part["function"]["name"] for part in parts if "id" in part] == ["get_weather"] * 2
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert not any(choice["delta"].get("content") for choice in choices)


async def test_tools_without_parallel_calls_return_the_first_call(tokenizer):
    async with calling(tokenizer) as (client, _):
        ask = {**ASK, "parallel_tool_calls": False}
        choice = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]
    assert read(choice["message"]["tool_calls"]) == TOLD[:1]


async def test_tool_choice_none_offers_no_tools_and_leaves_text_unchanged(tokenizer):
    async with calling(tokenizer) as (client, target):
        choice = (await client.post("/v1/chat/completions", json={**ASK, "tool_choice": "none"})).json()
    assert choice["choices"][0]["message"]["content"] == CALLS
    prompt = prompt_of(tokenizer, target)
    assert "Tools" not in prompt


async def test_tools_answer_without_a_call_is_text(tokenizer):
    async with calling(tokenizer, [*b"It rains.", 256]) as (client, _):
        ask = {**ASK, "max_tokens": 10}
        choice = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_tools_answer_cut_off_in_a_call_ends_by_length(tokenizer):
    cut = ANSWER[:60]
    async with client_of(tokenizer, ScriptedTarget(cut), template=TEMPLATE) as client:
        choice = (await client.post("/v1/chat/completions", json={**ASK, "max_tokens": 60})).json()[
            "choices"
        ][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_calls_and_their_results_go_back_into_the_chat(tokenizer):
    async with calling(tokenizer) as (client, _):
        said = (await client.post("/v1/chat/completions", json=ASK)).json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "sunny"}'}
            for call in said["tool_calls"]
        ]
        told = (await client.post("/tokenize", json={"messages": [*ASK["messages"], said, *results]})).json()
    chat = tokenizer.decode(told["tokens"], skip_special_tokens=False)
    results = '<|tool|>{"sky": "sunny"}<|end|>' * 2
    assert chat == f"<|user|>x<|end|><|assistant|>{CALLS}<|end|>{results}<|assistant|>"


async def test_chat_template_kwargs_reach_the_template(tokenizer):
    source = "{% if thinks %}think {{ effort }}{% endif %}{{ reasoning_effort }}:{{ messages[0].content }}"
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=ChatTemplate(source, {})) as client:
        ask = {"messages": ASK["messages"], "max_tokens": 3, "reasoning_effort": "low"}
        ask["chat_template_kwargs"] = {"thinks": True, "effort": 3}
        body = (await client.post("/v1/chat/completions", json=ask)).json()
    assert body["usage"]["prompt_tokens"] == len("think 3low:x")


@pytest.mark.parametrize(
    ("source", "effort", "told"),
    [
        ("{{ thinking_effort }}", "max", "max"),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "none", "False"),
        ("{{ thinking }}{{ enable_thinking }}", "none", "FalseFalse"),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "low", "low"),
        ("{{ reasoning_effort }}", "none", "none"),
    ],
)
async def test_reasoning_effort_reaches_the_variable_that_the_template_reads(tokenizer, source, effort, told):
    template = ChatTemplate(source + "{{ messages[0].content }}", {})
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=template) as client:
        ask = {"messages": ASK["messages"], "max_tokens": 3, "reasoning_effort": effort}
        body = (await client.post("/v1/chat/completions", json=ask)).json()
    assert body["usage"]["prompt_tokens"] == len(f"{told}x")


async def test_tools_demo_pair_calls_with_and_without_drafts():
    ask = {
        "messages": [{"role": "user", "content": f"What is the weather in {CITIES[0]}?"}],
        "tools": [TOOLS[0].definition("get_weather")],
        "temperature": 0,
        "max_tokens": 60,
    }
    async with service_of() as service:
        for mode in ("fixed", "off"):
            body = {**ask, "speculation": {"mode": mode}}
            choice = (await service.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert read(choice["message"]["tool_calls"]) == [("get_weather", {"city": CITIES[0]})]


BOOK = {
    "type": "function",
    "function": {
        "name": "book_a_table_nobody_heard_of",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "guests": {"type": "integer", "minimum": 2, "maximum": 9},
                "outside": {"type": "boolean"},
            },
            "required": ["guests", "outside"],
            "additionalProperties": False,
        },
    },
}
CHOICES = {
    "required": ("required", {"get_weather", "book_a_table_nobody_heard_of"}),
    "named": (
        {"type": "function", "function": {"name": "book_a_table_nobody_heard_of"}},
        {"book_a_table_nobody_heard_of"},
    ),
}


async def test_tools_forced_call_follows_its_schema_with_and_without_drafts():
    """The grammar alone makes the call: the model was never trained on this tool."""
    async with service_of() as service:
        for choice, names in CHOICES.values():
            ask = {
                "messages": [{"role": "user", "content": "Tell me a story."}],
                "tools": [WEATHER, BOOK],
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "seed": 3,
                "max_tokens": 120,
            }
            told = []
            for mode in ("fixed", "off"):
                body = {**ask, "speculation": {"mode": mode}}
                answer = (await service.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
                assert answer["finish_reason"] == "tool_calls"
                told.append(read(answer["message"]["tool_calls"]))
            ((name, arguments),) = told[0]
            assert name in names
            if name == BOOK["function"]["name"]:
                assert arguments["guests"] in range(2, 10)
                assert arguments.keys() == {"guests", "outside"}
            assert told[0] == told[1]


async def test_tools_strict_call_follows_its_schema_and_text_is_free():
    async with service_of(drafts=0) as service:
        ask = {
            "messages": [{"role": "user", "content": f"What is the weather in {CITIES[0]}?"}],
            "tools": [deepcopy(TOOLS[0].definition("get_weather"))],
            "temperature": 0,
            "max_tokens": 60,
        }
        ask["tools"][0]["function"]["strict"] = True
        ask["tools"][0]["function"]["parameters"]["properties"]["city"] = {"enum": ["Atlantis", "Eldorado"]}
        answer = (await service.http.post("/v1/chat/completions", json=ask)).json()["choices"][0]
        ((name, arguments),) = read(answer["message"]["tool_calls"])
        assert (name, arguments["city"] in ("Atlantis", "Eldorado")) == ("get_weather", True)
        ask["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
        ask["max_tokens"] = 8
        answer = (await service.http.post("/v1/chat/completions", json=ask)).json()["choices"][0]
        assert answer["message"]["content"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}]}, "tools"),
    ],
    ids=str,
)
async def test_tools_wrong_choice_is_named(tokenizer, wrong, field):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=TEMPLATE) as client:
        response = await client.post("/v1/chat/completions", json={**ASK, "tool_choice": "required", **wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"sky": "sunny"}}}}


@pytest.mark.parametrize(
    ("choice", "said", "is_held"),
    [
        ("auto", '{"sky": "sunny"}', True),
        ("auto", CALLS, True),
        ("auto", "It rains.", False),
        ("required", '{"sky": "sunny"}', False),
    ],
    ids=["answer", "calls", "other text", "answer for calls"],
)
async def test_tools_beside_a_response_format_leave_a_call_or_an_answer_of_the_form(
    tokenizer, choice, said, is_held
):
    ask = {**ASK, "tool_choice": choice, "response_format": JSON_ANSWER}
    async with calling(tokenizer) as (client, target):
        await client.post("/v1/chat/completions", json=ask)
    grammar = target.requests[0].open.sampling.grammar
    table = token_table(tokenizer.to_str(), tokenizer.get_vocab_size(), [256])
    ids = tokenizer.encode(said, add_special_tokens=False).ids
    matcher = compiled(grammar, table)
    follows = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert follows is is_held


async def test_calls_that_cannot_be_forced_are_refused(tokenizer):
    calls = {**RESPONSE_TEMPLATE["fields"]["tool_calls"], "open_pattern": "<call [0-9]>"}
    del calls["open"]
    known = {**RESPONSE_TEMPLATE, "fields": {**RESPONSE_TEMPLATE["fields"], "tool_calls": calls}}
    template = ChatTemplate("{{ tools }}{{ messages[0].content }}", {}, response_template=known)
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=template) as client:
        response = await client.post("/v1/chat/completions", json={**ASK, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ChatTemplate("{{ messages[0].content }}", {}), "knows none"),
        (ChatTemplate("{{ tools }}{{ messages[0].content }}", {}), "no response_template"),
    ],
    ids=["no tools", "no format"],
)
async def test_tools_that_the_model_cannot_be_offered_are_refused(tokenizer, template, reason):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=template) as client:
        response = await client.post("/v1/chat/completions", json=ASK)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert reason in response.json()["error"]["message"]
