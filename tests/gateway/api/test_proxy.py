"""Cancellations, from the client's call through the proxy to whoever answers."""

import asyncio
import warnings
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.support.patience import LIMIT_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    from ray.serve._private.grpc_util import gRPCGenericServer
    from ray.serve._private.proxy_request_response import gRPCStreamingType

from gateway.api.proxy import add_generation_servicer
from protos import generation_pb2, generation_pb2_grpc

LARGE = generation_pb2.GenerateChunk(text="x" * 2**20).SerializeToString()  # more than is sent to no reader
SMALL = generation_pb2.GenerateChunk(text="x").SerializeToString()


class Source:
    """Answers with these replies and then waits, as Serve's handler does: it waits before every reply."""

    def __init__(self, replies):
        self.replies = replies
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.peer_afterwards = None

    async def stream(self, request, context):
        for reply in [*self.replies, None]:
            self.started.set()
            try:
                await (asyncio.Event().wait() if reply is None else asyncio.sleep(0))
            except asyncio.CancelledError:
                self.peer_afterwards = context.peer()
                self.cancelled.set()
                return
            yield reply


@asynccontextmanager
async def served(stream):
    async def unary(request, context):
        return generation_pb2.Tokens(ids=[7]).SerializeToString()

    def route(service_method, streaming_type):
        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else unary

    server = gRPCGenericServer(route)
    add_generation_servicer(generation_pb2_grpc.GenerationServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield generation_pb2_grpc.GenerationStub(channel)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("replies", [[], [SMALL], [LARGE] * 8], ids=["none", "one", "more than is read"])
async def test_a_cancellation_reaches_whoever_answers_wherever_the_proxy_is(replies):
    source = Source(replies)
    async with served(source.stream) as stub, asyncio.timeout(LIMIT_S):
        call = stub.Generate(generation_pb2.GenerateRequest())
        await source.started.wait()
        if replies:
            await call.read()
        call.cancel()
        await source.cancelled.wait()
    assert source.peer_afterwards.startswith("ipv4:127.0.0.1:")


async def test_replies_pass_in_order_and_what_ends_them_too():
    async def stream(request, context):
        for text in "abc":
            yield generation_pb2.GenerateChunk(text=text).SerializeToString()
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)  # as Serve ends a stream
        context.set_details("enough")

    async with served(stream) as stub, asyncio.timeout(LIMIT_S):
        call = stub.Generate(generation_pb2.GenerateRequest())
        texts = [(await call.read()).text for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
    assert texts == ["a", "b", "c"]
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_other_methods_are_served_as_they_are():
    async with served(Source([]).stream) as stub, asyncio.timeout(LIMIT_S):
        tokens = await stub.Tokenize(generation_pb2.TokenizeRequest(text="x"))
    assert tokens.ids == [7]
