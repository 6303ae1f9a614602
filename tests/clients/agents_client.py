"""What OpenAI's agents are used for: a tool is called and its result told, over both of OpenAI's APIs."""

import asyncio
import sys
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

ASKED = "What is the weather in Rome?"


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return '{"sky": "sunny", "degrees": 21}'


async def main(base_url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=60)
    for model in (OpenAIResponsesModel("m", client), OpenAIChatCompletionsModel("m", client)):
        agent = Agent(name="weather", tools=[get_weather], model=model, model_settings=settings)
        assert "sunny" in (await Runner.run(agent, ASKED)).final_output
        streamed = Runner.run_streamed(agent, ASKED)
        async for _ in streamed.stream_events():
            pass
        assert "sunny" in streamed.final_output
    kept = OpenAIResponsesModel("m", client)
    agent = Agent(name="weather", tools=[get_weather], model=kept, model_settings=settings)
    first = await Runner.run(agent, ASKED, auto_previous_response_id=True)
    again = await Runner.run(agent, "And in Rome?", previous_response_id=first.last_response_id)
    assert again.final_output is not None
    print(version("openai-agents"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
