"""What LiteLLM is used for: answers, streams and calls by both of its routes, and errors by their kind."""

import json
import sys
from importlib.metadata import version
from typing import Any

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED = {"role": "user", "content": "What is the weather in Rome?"}


def main(root: str) -> None:
    openai = {"model": "openai/m", "api_base": f"{root}/v1", "api_key": "none", "num_retries": 0}
    claude = {"model": "anthropic/m", "api_base": root, "api_key": "none", "num_retries": 0}
    for route in (openai, claude):
        answers(route)
        tools(route)
    errors(openai)
    print(version("litellm"))


def answers(route: dict[str, Any]) -> None:
    ask = {**route, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**ask)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens > 0
    parts = litellm.completion(**ask, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text


def tools(route: dict[str, Any]) -> None:
    ask = {**route, "messages": [ASKED], "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    message = litellm.completion(**ask).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "degrees": 21}'}
    ask["messages"] = [ASKED, message.model_dump(), result]
    assert "sunny" in litellm.completion(**ask).choices[0].message.content


def errors(route: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "word " * 10**5}]
    try:
        litellm.completion(**route, messages=long, max_tokens=8)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt beyond the context was answered")


if __name__ == "__main__":
    main(sys.argv[1])
