"""The official client works unchanged: the app in a real server on loopback, over scripted workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import uvicorn

from gateway.api import http_api
from gateway.api.access import Authentication, digest
from gateway.api.openai.chat_template import ChatTemplate
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from tests.fakes.conversations import Cause
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import eventually

TEXT = "The cat sät on the mat."
ANSWER = list(TEXT.encode())
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
MESSAGES = [{"role": "user", "content": "x"}]
COUNT = len(ANSWER)


@asynccontextmanager
async def client_of(tokenizer, *workers, key="secret", **limits) -> AsyncIterator[openai.AsyncOpenAI]:
    settings = GatewaySettings(model="m", tokenizer="unused", **limits)
    authentication = Authentication((digest("secret"),), anonymous=False)
    async with fleet_of(*workers) as fleet:
        app = http_api.build(Generation(settings, tokenizer, fleet), TEMPLATE, authentication)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        base_url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            yield client
        server.should_exit = True
        await serving


@pytest.fixture
async def client(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3])) as client:
        yield client


async def test_openai_client_reads_a_completion(client):
    answer = await client.completions.create(model="m", prompt="x", max_tokens=COUNT, n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert len(answer.choices[0].logprobs.token_logprobs) == COUNT
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0  # nothing was predicted


async def test_openai_client_streams_completions(client):
    stream = await client.completions.create(model="m", prompt="x", max_tokens=COUNT, stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == TEXT


async def test_openai_client_reads_a_chat(client):
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, max_completion_tokens=COUNT, logprobs=True, top_logprobs=2, seed=3
    )
    assert answer.choices[0].message.content == TEXT
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_openai_client_streams_a_chat_with_usage_and_own_fields(client):
    stream = await client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        max_tokens=COUNT,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "speculation": {"mode": "fixed", "depth": 2, "report": True},
            "priority": "batch",
            "task": "qa",
        },
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].usage.speculation["depth"] == 2


async def test_response_hints_are_accepted(client):
    answer = await client.chat.completions.create(
        model="m",
        messages=[*MESSAGES, {"role": "assistant", "content": "y", "annotations": []}, *MESSAGES],
        max_tokens=100,
        max_completion_tokens=COUNT,
        metadata={"a": "b"},
        store=True,
        parallel_tool_calls=True,
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        prediction={"type": "content", "content": "The cat"},
        functions=[],
        seed=-3,
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.usage.speculation["seed"] == -3


async def test_openai_client_lists_models(client):
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"


async def test_openai_client_raises_its_own_errors(client, tokenizer):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="m", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")
    async with client_of(tokenizer, ScriptedTarget(ANSWER), key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    async with client_of(tokenizer, ScriptedDraft(ANSWER)) as alone:
        with pytest.raises(openai.InternalServerError):
            await alone.completions.create(model="m", prompt="x")


@pytest.mark.slow
async def test_openai_client_full_queue_is_a_rate_limit(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(2, 10_000), lost_with=Cause.LEAVING)
    async with client_of(tokenizer, target, max_requests=1, max_waiting=0, request_deadline_s=6.0) as client:
        waiting = asyncio.create_task(client.completions.create(model="m", prompt="x"))
        await eventually(lambda: target.requests)
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model="m", prompt="x")
        assert int(full.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError):
            await waiting


async def test_openai_client_failed_stream_raises(tokenizer):
    target = ScriptedTarget(ANSWER, lost_at=range(5, 10_000), lost_with=Cause.LEAVING)
    async with client_of(tokenizer, target, ScriptedDraft(ANSWER), request_deadline_s=1.1) as client:
        stream = await client.completions.create(model="m", prompt="x", max_tokens=COUNT, stream=True)
        with pytest.raises(openai.APIError, match="lost by the script"):
            async for _ in stream:
                pass


async def test_openai_client_reads_a_response(client):
    answer = await client.responses.create(model="m", input="x", max_output_tokens=COUNT)
    assert answer.output_text == TEXT
    assert answer.usage.output_tokens == COUNT


async def test_openai_client_streams_responses(tokenizer):
    async with (
        client_of(tokenizer, ScriptedTarget(ANSWER, finish_reason="stop")) as client,
        client.responses.stream(model="m", input="x", max_output_tokens=COUNT) as stream,
    ):
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert answer.output_text == TEXT


async def test_openai_client_gets_log_probabilities_of_several_prompts(client):
    answer = await client.completions.create(
        model="m", prompt=["x", "yy"], max_tokens=0, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["x", "yy"]
    assert answer.choices[1].logprobs.token_logprobs == [None, -0.25]
