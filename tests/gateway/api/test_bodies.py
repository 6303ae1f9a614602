"""Bounds on slow bodies and on the work before an answer: further requests are answered meanwhile."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.api.bodies import Bodies
from gateway.errors import OverloadedError
from gateway.generation import generation
from gateway.generation.tokenization import Tokenization
from gateway.settings import BODIES_AT_ONCE, RequestSettings
from protos import generation_pb2
from tests.fakes.scripted import MAX_LENGTH, ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER, ASK, CHAT, client_of
from tests.support.patience import LIMIT_S, eventually

JSON = {"content-type": "application/json"}
WORK = {
    "/v1/completions": ASK,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": len(ANSWER)},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


def request_of(*parts: bytes, then: str = "nothing") -> Request:
    """Request whose body begins with these parts; then it stalls, ends, or the client leaves."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if then == "end":
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    if then == "farewell":
        messages.append({"type": "http.disconnect"})

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    return Request({"type": "http", "headers": headers}, receive)


async def test_read_whole_body_joins_its_parts():
    assert await Bodies(100, LIMIT_S).read(request_of(b"[1", b", 2]", then="end")) == b"[1, 2]"


async def test_read_body_comes_too_slowly_is_refused_and_closes_the_connection():
    with pytest.raises(HTTPException) as refused:
        await Bodies(100, within_s=0.01).read(request_of(b"["))
    assert refused.value.status_code == 408
    assert refused.value.headers == {"Connection": "close"}


async def test_read_client_leaves_is_no_defect():
    with pytest.raises(HTTPException) as refused:
        await Bodies(100, LIMIT_S).read(request_of(b"[", then="farewell"))
    assert refused.value.status_code == 400


async def test_read_more_bodies_than_are_read_at_a_time_drops_the_oldest():
    bodies, ended = Bodies(100, LIMIT_S), []

    async def read(number):
        try:
            await bodies.read(request_of(b"["))
        except HTTPException as refused:
            ended.append((number, refused.status_code))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(number)) for number in range(BODIES_AT_ONCE + 3)]
        await eventually(lambda: len(ended) == 3)
        assert await bodies.read(request_of(b"1", then="end")) == b"1"
        await eventually(lambda: len(ended) == 4)
        assert ended == [(number, 408) for number in range(4)]
        for task in tasks:
            task.cancel()


async def test_http_half_sent_bodies_delay_no_answer(tokenizer):
    started = []

    async def half():
        started.append(1)
        yield b"{"
        await asyncio.Event().wait()

    few = {"drafts": {}, "drafters": ("ngram",), "max_requests": 1, "max_waiting": 0}
    async with client_of(tokenizer, ScriptedTarget(ANSWER), **few) as client:
        count = 2 * BODIES_AT_ONCE
        posts = [
            asyncio.create_task(client.post("/v1/completions", content=half(), headers=JSON))
            for _ in range(count)
        ]
        await eventually(lambda: len(started) == count)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        for post in posts:
            post.cancel()
        outcomes = await asyncio.gather(*posts, return_exceptions=True)
    answered = [outcome.status_code for outcome in outcomes if isinstance(outcome, httpx.Response)]
    assert answered
    assert {*answered} == {408}


@pytest.fixture
def busy(monkeypatch):
    """Blocks tokenizing until the test is over; a single request may be prepared at a time."""
    monkeypatch.setattr(generation, "PREPARED_AT_ONCE", 1)
    working = []

    async def encode(tokenization, text, **how):
        working.append(text)
        await asyncio.Event().wait()

    monkeypatch.setattr(Tokenization, "encode", encode)
    return working


@pytest.mark.parametrize("path", WORK)
async def test_endpoint_with_a_body_waits_for_a_place_before_its_work(tokenizer, busy, path):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), max_waiting=0) as client:
        first = asyncio.create_task(client.post("/tokenize", json={"prompt": "x"}))
        await eventually(lambda: busy)
        response = await client.post(path, json=WORK[path])
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        first.cancel()


CALLS = {
    "Generate": generation_pb2.GenerateRequest(text="x"),
    "Complete": generation_pb2.GenerateRequest(text="x"),
    "Tokenize": generation_pb2.TokenizeRequest(text="x"),
    "Detokenize": generation_pb2.DetokenizeRequest(ids=[1]),
}


@pytest.mark.parametrize("method", CALLS)
async def test_grpc_method_with_work_waits_for_a_place_before_it(tokenizer, busy, method):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet, AsyncExitStack() as places:
        servicer = servicer_of(fleet, tokenizer, max_waiting=0)
        preparations = servicer.generation.preparations
        await places.enter_async_context(preparations.permit(servicer.generation.deadline()))
        call = getattr(servicer, method)(CALLS[method], Context())
        with pytest.raises(OverloadedError):
            await (anext(call) if method == "Generate" else call)


async def test_tokenize_text_longer_than_any_prompt_is_refused_untokenized(tokenizer, busy):
    longest = MAX_LENGTH - 1
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        for body in (
            {"prompt": "a" * 32 * MAX_LENGTH},
            {"messages": [{"role": "user", "content": "a" * 32 * MAX_LENGTH}]},
        ):
            error = (await client.post("/tokenize", json=body)).json()["error"]
            assert error["param"] == next(iter(body))
            assert f"at most {longest} are accepted" in error["message"]
    assert not busy


async def test_detokenize_more_ids_than_a_context_are_refused(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        response = await client.post("/detokenize", json={"tokens": [1] * (MAX_LENGTH + 1)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


def test_request_settings_most_at_once_leaves_room_for_health():
    few = RequestSettings(max_requests=1, max_waiting=1)
    many = RequestSettings(max_requests=101, max_waiting=11)
    assert few.most_at_once > BODIES_AT_ONCE
    assert many.most_at_once - few.most_at_once == 100 + 3 * 10
