"""What LangChain's chat models are used for: answers, streams, calls, forms, and responses that go on."""

import sys
from importlib.metadata import version
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

ASKED = HumanMessage("What is the weather in Rome?")


class Age(BaseModel):
    """Age of a person in years."""

    model_config = ConfigDict(extra="forbid")

    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return '{"sky": "sunny", "degrees": 21}'


def main(root: str) -> None:
    given: dict[str, Any] = {"model": "m", "max_tokens": 60, "temperature": 0, "max_retries": 0}
    of_openai = {**given, "base_url": f"{root}/v1", "api_key": "none"}
    chats = ChatOpenAI(**of_openai)
    responses = ChatOpenAI(**of_openai, use_responses_api=True, use_previous_response_id=True)
    claude = ChatAnthropic(**given, base_url=root, api_key="none")
    for model in (chats, responses, claude):
        answers(model)
        calls(model)
    form(chats)
    print(version("langchain-openai"))


def answers(model: Any) -> None:
    whole = model.invoke([HumanMessage("Hi")])
    streamed = AIMessageChunk("")
    for part in model.stream([HumanMessage("Hi")]):
        streamed += part
    assert whole.text
    assert streamed.text == whole.text
    assert whole.usage_metadata["output_tokens"] > 0


def calls(model: Any) -> None:
    able = model.bind_tools([get_weather])
    answer = able.invoke([ASKED])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert "sunny" in able.invoke([ASKED, answer, result]).text


def form(model: Any) -> None:
    for method in ("json_schema", "function_calling"):
        told = model.with_structured_output(Age, method=method).invoke([HumanMessage("How old is she?")])
        assert isinstance(told, Age), method


if __name__ == "__main__":
    main(sys.argv[1])
