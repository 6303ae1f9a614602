"""/v1/messages: a chat in Anthropic's form, read by Anthropic's own package, whole and as events."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from gateway.api import http_api
from gateway.api.anthropic.answer import SIGNATURE
from gateway.api.openai.chat_template import ChatTemplate
from tests.fakes.scripted import MAX_LENGTH, ScriptedDraft, ScriptedTarget
from tests.support.anthropic_client import ASK, PATH, USER, sdk_of
from tests.support.http_calls import ANSWER, TEXT, client_of
from tests.support.service import ANYBODY, service_of
from workshop.demo.chat import CHAT_TEMPLATE, RESPONSE_TEMPLATE

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, response_template=RESPONSE_TEMPLATE)
THINKING = ChatTemplate(
    "{% if enable_thinking %}think {% endif %}<think>{{ messages[0].content }}[/INST]", {}
)
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Zürich"}}</tool_call>'
CALLING = [*f"Look:{CALL}{CALL}".encode(), 256]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


@pytest.fixture
async def claude(tokenizer: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with sdk_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as client:
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(target: ScriptedTarget) -> str:
    return bytes(target.requests[1].decode.turn.tokens).decode()


def plain(message: Any) -> dict[str, Any]:
    """Returns what two answers to one request have in common."""
    return {**message.model_dump(exclude={"id"}), "content": [_without_id(part) for part in message.content]}


def _without_id(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.model_dump().items() if name != "id"}


# Answers


async def test_message_has_text_stop_reason_and_usage(tokenizer):
    async with sdk_of(tokenizer, ScriptedTarget(ANSWER, cached_tokens=3)) as client:
        message = await client.messages.create(**ASK)
    assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "m", "max_tokens")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len("user:x;")
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (3, len(ANSWER))


@pytest.mark.parametrize("answer", [ANSWER, CALLING], ids=["text", "calls"])
async def test_message_streamed_is_the_whole_message(tokenizer, answer):
    workers = ScriptedTarget(answer, finish_reason="stop"), ScriptedDraft(answer)
    ask = {**ASK, "max_tokens": len(answer), "tools": [TOOL], "extra_body": {"seed": 7}}
    async with sdk_of(tokenizer, *workers, template=TEMPLATE) as client:
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            streamed = await stream.get_final_message()
    first, second = plain(streamed), plain(whole)
    for each in first, second:
        each["usage"].pop("speculation", None)  # how much is drafted follows from time
    assert first == second


async def test_message_events_come_in_the_order_that_clients_read(client):
    events = events_of(await client.post(PATH, json={**ASK, "stream": True}))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len("user:x;")
    assert events[-2]["usage"]["output_tokens"] == len(ANSWER)


async def test_message_with_calls_has_a_block_for_each(tokenizer):
    async with sdk_of(tokenizer, ScriptedTarget(CALLING, finish_reason="stop"), template=TEMPLATE) as client:
        message = await client.messages.create(**{**ASK, "max_tokens": len(CALLING)}, tools=[TOOL])
    text, *calls = message.content
    assert text.text == "Look:"
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "f", {"city": "Zürich"})
    ] * 2
    assert message.stop_reason == "tool_use"
    assert all(call.id.startswith("toolu_") for call in calls)
    assert calls[0].id != calls[1].id


async def test_blank_text_before_a_call_makes_no_block(tokenizer):
    said = [*f"\n\n{CALL}\n{CALL}".encode(), 256]
    async with sdk_of(tokenizer, ScriptedTarget(said, finish_reason="stop"), template=TEMPLATE) as client:
        message = await client.messages.create(**{**ASK, "max_tokens": len(said)}, tools=[TOOL])
    assert [block.type for block in message.content] == ["tool_use", "tool_use"]


async def test_message_with_one_call_at_most_has_one(tokenizer):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with sdk_of(tokenizer, ScriptedTarget(CALLING, finish_reason="stop"), template=TEMPLATE) as client:
        ask = {**ASK, "max_tokens": len(CALLING)}
        message = await client.messages.create(**ask, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in message.content] == ["text", "tool_use"]


async def test_message_cut_within_a_call_has_an_empty_input(tokenizer):
    cut = len('Look:<tool_call>{"name": "f", "arguments": {"ci')
    async with sdk_of(tokenizer, ScriptedTarget(CALLING), template=TEMPLATE) as client:
        message = await client.messages.create(**{**ASK, "max_tokens": cut}, tools=[TOOL])
    assert message.content[1].input == {}
    assert message.stop_reason == "max_tokens"


async def test_blank_thoughts_add_nothing_to_the_text(tokenizer):
    said = [*b"<think>\n</think>\n\nYes."]
    async with sdk_of(tokenizer, ScriptedTarget(said), template=THINKING) as client:
        message = await client.messages.create(**{**ASK, "max_tokens": len(said)})
        template = ChatTemplate("<think>{{ messages[0].content }}[/INST]", {})
    async with client_of(tokenizer, ScriptedTarget(said), template=template) as client:
        ask = {"messages": [USER], "max_tokens": len(said)}
        chat = (await client.post("/v1/chat/completions", json=ask)).json()
    assert [block.text for block in message.content] == [chat["choices"][0]["message"]["content"]]


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_message_of_a_thinking_model_has_thoughts_and_then_text(tokenizer, display):
    said = [*b"<think>so\n</think>\n\nYes."]
    thinking = {"type": "adaptive", "display": display}
    target = ScriptedTarget(said)
    async with sdk_of(tokenizer, target, template=THINKING) as client:
        ask = {**ASK, "max_tokens": len(said), "extra_body": {"thinking": thinking}}
        message = await client.messages.create(**ask)
    thoughts, text = message.content
    assert (thoughts.type, thoughts.signature) == ("thinking", SIGNATURE)
    assert thoughts.thinking.strip() == ("" if display == "omitted" else "so")
    assert text.text.strip() == "Yes."
    assert prompt_of(target).startswith("think ")


async def test_message_without_thinking_asks_the_template_for_none(tokenizer):
    target = ScriptedTarget([*b"</think>Yes."])
    async with sdk_of(tokenizer, target, template=THINKING) as client:
        await client.messages.create(**ASK)
    assert prompt_of(target) == "<think>x[/INST]"


async def test_message_ended_by_a_stop_sequence_names_it(claude):
    message = await claude.messages.create(**ASK, stop_sequences=["dog", " on"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " on")
    assert message.content[0].text == "The cat sät"


async def test_message_longer_than_the_context_is_cut_and_says_so(tokenizer):
    """Agents ask for tens of thousands of tokens, whatever the model."""
    answer = [*b"x" * 2 * MAX_LENGTH]
    async with sdk_of(tokenizer, ScriptedTarget(answer)) as client:
        message = await client.messages.create(**{**ASK, "max_tokens": 100_000}, timeout=60)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == MAX_LENGTH - len("user:x;")


async def test_answer_has_the_request_id_under_the_name_that_the_package_reads(claude):
    message = await claude.messages.create(**ASK, extra_headers={"X-Request-Id": "mine"})
    assert message._request_id == "mine"


# Conversations


async def test_message_begun_by_the_caller_goes_on(tokenizer):
    target = ScriptedTarget(ANSWER)
    async with sdk_of(tokenizer, target) as client:
        begun = {"role": "assistant", "content": "So"}
        message = await client.messages.create(**{**ASK, "messages": [USER, begun]})
    assert prompt_of(target) == "user:x;assistant:So"
    assert message.content[0].text == TEXT


async def test_conversation_with_calls_and_results_reaches_the_template(tokenizer):
    target = ScriptedTarget(ANSWER)
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }} {{ m.content }} {{ m.reasoning_content }} {{ m.name }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}]{% endfor %}{{ tools | length if tools else 0 }}",
        {},
        response_template=RESPONSE_TEMPLATE,
    )
    async with sdk_of(tokenizer, target, template=template) as client:
        await client.messages.create(**{**ASK, "messages": conversation}, tools=[TOOL])
    assert prompt_of(target) == (
        '[user a\nb  ][assistant Look: hm  f{"city": "Zürich"} g{}]'
        "[tool sunny  f][tool Error:   g][user And?  ]1"
    )


async def test_instructions_are_one_message_without_the_line_of_billing(tokenizer):
    target = ScriptedTarget(ANSWER)
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    reminder = {"role": "system", "content": "Be kind."}
    async with sdk_of(tokenizer, target) as client:
        await client.messages.create(**{**ASK, "messages": [USER, reminder]}, system=system)
    assert prompt_of(target) == "system:Be brief.\nBe kind.;user:x;"


async def test_request_as_claude_code_sends_it_is_answered(tokenizer):
    ask = {
        **ASK,
        "system": [{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{**TOOL, "strict": False, "defer_loading": True, "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
        "stream": True,
    }
    headers = {"x-api-key": "k", "anthropic-beta": "a,b", "x-claude-code-session-id": "s"}
    async with client_of(tokenizer, ScriptedTarget(ANSWER), template=TEMPLATE) as client:
        response = await client.post(f"{PATH}?beta=true", json=ask, headers=headers)
    assert response.status_code == 200, response.text
    assert events_of(response)[-1] == {"type": "message_stop"}
    ignored = response.headers["outrider-ignored"].split(", ")
    assert {"context_management", "metadata", "output_config.effort"} <= {*ignored}


async def test_forced_call_is_held_to_the_tool_with_drafts_and_without():
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}}}
    tool = {**TOOL, "strict": True, "input_schema": {**schema, "required": ["age"]}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    ask = {**ASK, "max_tokens": 120, "tools": [tool], "tool_choice": choice, "temperature": 0}
    async with service_of() as service:
        app = http_api.build(service.generation, TEMPLATE, ANYBODY)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            first, second = [
                (await client.post(PATH, json={**ask, "speculation": {"mode": mode}})).json()
                for mode in ("fixed", "off")
            ]
    (call,) = first["content"]
    assert call["input"]["age"] in range(100)
    assert call["input"] == second["content"][0]["input"]
    assert first["usage"]["speculation"]["rounds"] > 0 == second["usage"]["speculation"]["rounds"]


# Counts


async def test_count_is_that_of_the_prompt(tokenizer):
    async with sdk_of(tokenizer, ScriptedTarget(CALLING), template=TEMPLATE) as client:
        ask = {"model": "m", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
        counted = await client.messages.count_tokens(**ask)
        message = await client.messages.create(**ask, max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens > len("Be brief.")


async def test_count_of_a_conversation_beyond_the_context_is_told(tokenizer):
    async with sdk_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        long = {"role": "user", "content": "x" * 2 * MAX_LENGTH}
        counted = await client.messages.count_tokens(model="m", messages=[long])
    assert counted.input_tokens > 2 * MAX_LENGTH
