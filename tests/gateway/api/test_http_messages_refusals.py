"""/v1/messages: refusals, and errors of answers under way, as Anthropic's own package knows them."""

import anthropic
import pytest

from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.anthropic_client import ASK, PATH, USER, sdk_of
from tests.support.http_calls import ANSWER, client_of


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": -1}, "temperature"),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_request_that_is_wrong_is_refused_by_name_in_the_shape_of_this_api(client, wrong, named):
    response = await client.post(PATH, json={**ASK, **wrong}, headers={"X-Request-Id": "mine"})
    body = response.json()
    assert (response.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(f"{named}")
    assert response.headers["request-id"] == "mine"


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_key_is_read_from_either_header(tokenizer, header):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=("right",)) as client:
        for key, status in (("right", 200), ("wrong", 401)):
            value = key if header == "x-api-key" else f"Bearer {key}"
            assert (await client.post(PATH, json=ASK, headers={header: value})).status_code == status


async def test_errors_are_those_that_the_package_knows(tokenizer):
    async with sdk_of(tokenizer, ScriptedTarget(ANSWER), key="wrong", keys=("right",)) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASK)
    async with sdk_of(tokenizer, ScriptedTarget(ANSWER), key="right", keys=("right",)) as client:
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(**{**ASK, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**ASK, extra_body={"temperature": -1})


async def test_stream_that_fails_raises_the_error_of_the_package(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(4, 10_000), lost_with=Cause.FAILED)
    async with sdk_of(tokenizer, target, ScriptedDraft(ANSWER)) as client:
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async with client.messages.stream(
                **ASK, extra_body={"speculation": {"mode": "fixed", "depth": 1}}
            ) as stream:
                await stream.get_final_message()


async def test_stream_beyond_its_deadline_tells_the_type_of_the_error(tokenizer):
    slow = ScriptedTarget(ANSWER, step_s=0.1)
    async with sdk_of(tokenizer, slow, request_deadline_s=0.5) as client:
        with pytest.raises(anthropic.APIStatusError, match="timeout_error"):
            async with client.messages.stream(**ASK, extra_body={"speculation": {"mode": "off"}}) as stream:
                await stream.get_final_message()
