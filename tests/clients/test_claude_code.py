"""Requests in the order in which Claude Code sends them, by Anthropic's package over a real server."""

from typing import Any

import anthropic
import httpx

from tests.clients.served import Served

BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
BILLING = "x-anthropic-billing-header: cc_version=2.1.180; cc_entrypoint=cli; cch=00000"
CACHED = {"type": "ephemeral"}
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": CACHED,
}
ASKED = {"role": "user", "content": [{"type": "text", "text": "What is the weather in Rome?"}]}
THOUGHT = {"type": "thinking", "thinking": "The tool knows.", "signature": "of another service"}
SESSION = {"x-claude-code-session-id": "7d9f"}


async def test_requests_of_claude_code_are_answered_in_their_order(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.root) as http:
        assert (await http.head("/")).status_code == 200
        listed = (await http.get("/v1/models?limit=1000")).json()["data"]
        assert [model["id"] for model in listed] == ["m"]
    async with anthropic.AsyncAnthropic(base_url=served.root, auth_token="none", max_retries=0) as client:
        claude: Any = client  # requests are plain objects here
        common = {"model": "m", "betas": BETAS, "extra_headers": SESSION}
        titled = await claude.beta.messages.create(
            **common,
            max_tokens=16,
            system=[{"type": "text", "text": BILLING}, {"type": "text", "text": "Name the conversation."}],
            messages=[{"role": "user", "content": "Hi"}],
            metadata={"user_id": "user_1"},
        )
        assert titled.content[0].text
        ask = {
            **common,
            "max_tokens": 60,
            "extra_body": {"temperature": 0},  # Claude Code names none
            "system": [
                {"type": "text", "text": BILLING},
                {"type": "text", "text": "Use tools.", "cache_control": CACHED},
            ],
            "tools": [TOOL],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "metadata": {"user_id": "user_1"},
        }
        counted = await claude.beta.messages.count_tokens(
            model="m", betas=BETAS, system=ask["system"], tools=[TOOL], messages=[ASKED]
        )
        async with claude.beta.messages.stream(**ask, messages=[ASKED]) as stream:
            called = await stream.get_final_message()
        (call,) = [block for block in called.content if block.type == "tool_use"]
        assert (called.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
        usage = called.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": '{"sky": "sunny", "degrees": 21}'}],
            "cache_control": CACHED,
        }
        history = [
            ASKED,
            {"role": "assistant", "content": [THOUGHT, *called.content]},
            {"role": "user", "content": [result]},
        ]
        async with claude.beta.messages.stream(**ask, messages=history) as stream:
            answered = await stream.get_final_message()
        assert "sunny" in answered.content[0].text
        assert answered.stop_reason == "end_turn"
