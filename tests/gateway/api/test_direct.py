"""Calls at a gateway's own port end with the status of the API, and without the exception's text."""

import logging
from contextlib import asynccontextmanager

import grpc
import pytest

from gateway.api.direct import NO_MESSAGE, direct_server
from gateway.api.refusals_log import shorten_refusals
from gateway.errors import DEFECT
from gateway.generation.tokenization import Tokenization
from protos import generation_pb2, generation_pb2_grpc
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import servicer_of
from tests.support.http_calls import ANSWER

WRONG = generation_pb2.GenerateRequest(text="x", n=1000)
SECRET = "the prompt of somebody"


@asynccontextmanager
async def channel_of(tokenizer, **settings):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        server, port = direct_server(servicer_of(fleet, tokenizer, **settings), "127.0.0.1:0", -1)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield channel
        finally:
            await server.stop(None)


@pytest.fixture
def logged():
    """Records of Serve's log, as its handlers get them."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    shorten_refusals()
    yield records
    logger.removeHandler(handler)


async def end_of(call):
    """Returns status code and details of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    return ended.value.code(), ended.value.details()


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_direct_wrong_value_ends_with_the_apis_own_words(tokenizer, method):
    async with channel_of(tokenizer) as channel:
        call = getattr(generation_pb2_grpc.GenerationStub(channel), method)(WRONG)
        code, details = await end_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("n: 1000")


async def test_direct_missing_key_ends_with_the_apis_own_words(tokenizer):
    async with channel_of(tokenizer, keys=["k"]) as channel:
        code, details = await end_of(generation_pb2_grpc.GenerationStub(channel).Complete(WRONG))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert details.startswith("an API key is needed")


async def test_direct_defect_is_logged_and_its_text_told_to_nobody(tokenizer, monkeypatch, logged):
    async def encode(*_, **__):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(Tokenization, "encode", encode)
    async with channel_of(tokenizer) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        told = await end_of(stub.Tokenize(generation_pb2.TokenizeRequest(text="x")))
    assert told == (grpc.StatusCode.INTERNAL, DEFECT)
    assert [str(record.exc_info[1]) for record in logged] == [SECRET]


async def test_direct_refusal_is_one_line_of_the_log(tokenizer, logged):
    async with channel_of(tokenizer) as channel:
        await end_of(generation_pb2_grpc.GenerationStub(channel).Complete(WRONG))
    assert [(record.getMessage(), record.exc_info) for record in logged] == [
        ("Request failed. InvalidRequestError", None)
    ]


@pytest.mark.parametrize("method", ["outrider.v1.Generation/Complete", "grpc.health.v1.Health/Check"])
async def test_direct_malformed_message_is_the_callers_fault(tokenizer, method):
    async with channel_of(tokenizer) as channel:
        told = await end_of(channel.unary_unary(f"/{method}")(b"\xff"))
    assert told == (grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
