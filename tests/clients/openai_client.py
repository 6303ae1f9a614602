"""What the official client is used for, in an environment without anything else: with the base URL."""

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
}
ASKED = {"role": "user", "content": "What is the weather in Rome?"}
DRAFTED = {"speculation": {"mode": "fixed", "depth": 4}}


class Age(BaseModel):
    age: int


def main(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    completions(client)
    chats(client)
    tools(client)
    responses(client)
    print(openai.__version__)


def completions(client: Any) -> None:
    ask = {"model": "m", "prompt": "The cat", "max_tokens": 8, "seed": 1, "extra_body": DRAFTED}
    whole = client.completions.create(**ask).choices[0].text
    assert "".join(part.choices[0].text for part in client.completions.create(**ask, stream=True)) == whole
    scored = client.completions.create(model="m", prompt=["a b", "c"], max_tokens=0, echo=True, logprobs=1)
    assert [choice.text for choice in scored.choices] == ["a b", "c"]


def chats(client: Any) -> None:
    ask = {"model": "m", "messages": [ASKED], "max_tokens": 8, "seed": 1}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    parts = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole
    parsed = client.chat.completions.parse(**{**ask, "max_tokens": 40}, response_format=Age)
    assert isinstance(parsed.choices[0].message.parsed, Age)


def tools(client: Any) -> None:
    tool = {"type": "function", "function": WEATHER}
    ask = {"model": "m", "messages": [ASKED], "tools": [tool], "temperature": 0, "max_tokens": 60}
    choice = client.chat.completions.create(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": "Rome"})
    with client.chat.completions.stream(**ask) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "degrees": 21}'}
    ask["messages"] = [ASKED, choice.message, result]
    assert "sunny" in client.chat.completions.create(**ask).choices[0].message.content


def responses(client: Any) -> None:
    ask = {"model": "m", "input": "What is the weather in Rome?", "temperature": 0, "max_output_tokens": 60}
    ask["tools"] = [{"type": "function", **WEATHER, "strict": True}]
    (call,) = client.responses.create(**ask).output
    assert (call.type, json.loads(call.arguments)["city"]) == ("function_call", "Rome")
    with client.responses.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output[0].arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds


if __name__ == "__main__":
    main(sys.argv[1])
