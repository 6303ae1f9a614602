"""Refusals over HTTP: the field is named, the value is not repeated."""

import json

import pytest

from tests.fakes.scripted import MAX_LENGTH, ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, TEXT, client_of


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "max_tokens"),
        ({"speculation": {"mode": "fixed", "depth": 99}}, "speculation.depth"),
        ({"depht": 4}, "depht"),
        ({"prompt": [99999]}, "prompt"),
        ({"logit_bias": {"99999": 1.0}}, "logit_bias"),
        ({"prompt": ["x", ["y"]]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x", "y"], "n": 33}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"verification": "block"}, "verification"),
        ({"speculation": {"verification": "luck"}}, "speculation.verification"),
        ({"priority": "urgent"}, "priority"),
        ({"echo": True, "logprobs": 1, "logprobs_of": "processed"}, "logprobs_of"),
        ({"min_tokens": 30}, "max_tokens"),
        ({"allowed_token_ids": [1], "bad_token_ids": [1]}, "bad_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "y"}, "suffix"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"speculation": {"depth": 17}}, "speculation.depth"),
        ({"speculation": {"drafter": "magic"}}, "speculation.drafter"),
        ({"max_token": 5}, "max_token"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"stop": "x" * 1025}, "stop.0"),
        ({"logit_bias": dict.fromkeys(range(5000), 1)}, "logit_bias"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 1000}, "allowed_token_ids"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"task": "x" * 65}, "task"),
    ],
    ids=str,
)
async def test_completion_wrong_field_is_named(client, wrong, field):
    response = await client.post("/v1/completions", json={**ASK, **wrong})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("many", "field"),
    [
        ({"stop_token_ids": [-1] * 100_000}, "stop_token_ids"),
        ({"logit_bias": {f"k{i}": 1 for i in range(4000)}}, "body"),
        ({"logit_bias": {f"k{i}": 1 for i in range(50_000)}}, "logit_bias"),
        ({f"f{i}": 1 for i in range(50_000)}, "body"),
        ({"messages": [{"role": "judge"}] * 4000}, "messages.0.role"),
        ({"messages": CHAT["messages"] * 5000}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_refusal_of_many_mistakes_gives_their_number(client, many, field):
    """Listing all mistakes would take seconds, in which no stream of this gateway moves."""
    response = await client.post("/v1/chat/completions", json={**CHAT, **many})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("there", "told"), [((), "none"), (("eagle3",), "'eagle3'")])
async def test_drafter_that_the_target_lacks_is_refused(tokenizer, there, told):
    asked = {**ASK, "speculation": {"drafter": "medusa"}}
    async with client_of(tokenizer, ScriptedTarget(ANSWER), target_drafters=there) as client:
        response = await client.post("/v1/completions", json=asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "speculation.drafter")
    assert (
        f"'medusa' would run in the target's process, and there runs {told}; there are: " in error["message"]
    )


async def test_drafter_that_the_target_has_is_served(tokenizer):
    asked = {**ASK, "speculation": {"drafter": "medusa"}}
    async with client_of(tokenizer, ScriptedTarget(ANSWER), target_drafters=("medusa",)) as client:
        response = await client.post("/v1/completions", json=asked)
        offered = (await client.get("/health")).json()["drafters"]
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, TEXT)
    assert ("medusa" in offered, "eagle3" in offered) == (True, False)


async def test_request_for_another_model_is_not_found(client):
    response = await client.post("/v1/completions", json={**ASK, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = {"id": "1", "function": {"name": "f", "arguments": "[1]"}}
ARGUMENTS = "messages.0.tool_calls.0.function.arguments"


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"max_tokens": MAX_LENGTH}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": MAX_LENGTH}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * MAX_LENGTH}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, ARGUMENTS),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "x"}, "prompt"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]},
            "messages.0.annotations",
        ),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"guided_json": {}}, "guided_json"),
    ],
    ids=str,
)
async def test_chat_wrong_field_is_named(client, wrong, field):
    response = await client.post("/v1/chat/completions", json={**CHAT, **wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("text", ["a prompt that is secret", ["a prompt that is secret"] * 2])
async def test_refusal_does_not_repeat_text_of_the_request(client, text):
    wrong = {"prompt": text, "max_tokens": -1, "stop": [text] * 20, "user": text, "task": {"a": text}}
    response = await client.post("/v1/completions", json=wrong)
    assert response.status_code == 400
    assert "secret" not in response.text


async def test_http_other_content_type_is_refused(client):
    """A page in a browser may send plain text to a service on its machine without being asked."""
    response = await client.post(
        "/v1/completions", content=json.dumps(ASK), headers={"content-type": "text/plain"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")
