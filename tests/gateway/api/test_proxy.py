"""Cancellations and malformed messages, from the client's call through the proxy to the handler."""

import asyncio
import warnings
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.patience import LIMIT_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    from ray.serve._private.grpc_util import gRPCGenericServer
    from ray.serve._private.proxy_request_response import gRPCStreamingType

from gateway.api.direct import NO_MESSAGE
from gateway.api.proxy import add_generation_servicer, add_health_servicer
from protos import generation_pb2, generation_pb2_grpc

LARGE = generation_pb2.GenerateChunk(
    text="x" * 2**20
).SerializeToString()  # bytes that fill the buffers of a call without a reader
SMALL = generation_pb2.GenerateChunk(text="x").SerializeToString()


class Source:
    """Handler that waits before every reply, as Serve's handler does, and after the last reply."""

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
    add_health_servicer(health_pb2_grpc.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


@pytest.mark.parametrize("replies", [[], [SMALL], [LARGE] * 8], ids=["none", "one", "more than is read"])
@pytest.mark.parametrize(
    "opened",
    [
        lambda channel: generation_pb2_grpc.GenerationStub(channel).Generate(
            generation_pb2.GenerateRequest()
        ),
        lambda channel: health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()),
    ],
    ids=["Generate", "Watch"],
)
async def test_proxy_cancellation_reaches_the_handler_at_every_point(opened, replies):
    source = Source(replies)
    async with served(source.stream) as channel, asyncio.timeout(LIMIT_S):
        call = opened(channel)
        await source.started.wait()
        if replies:
            await call.read()
        call.cancel()
        await source.cancelled.wait()
    assert source.peer_afterwards.startswith("ipv4:127.0.0.1:")


async def test_proxy_stream_keeps_order_and_ending():
    async def stream(request, context):
        for text in "abc":
            yield generation_pb2.GenerateChunk(text=text).SerializeToString()
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)  # as Serve ends a stream
        context.set_details("enough")

    async with served(stream) as channel, asyncio.timeout(LIMIT_S):
        call = generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest())
        texts = [(await call.read()).text for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
    assert texts == ["a", "b", "c"]
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_proxy_unary_method_is_served_unchanged():
    async with served(Source([]).stream) as channel, asyncio.timeout(LIMIT_S):
        tokens = await generation_pb2_grpc.GenerationStub(channel).Tokenize(
            generation_pb2.TokenizeRequest(text="x")
        )
    assert tokens.ids == [7]


@pytest.mark.parametrize(
    "call",
    [
        lambda channel: channel.unary_unary("/outrider.v1.Generation/Complete")(b"\xff"),
        lambda channel: channel.unary_stream("/outrider.v1.Generation/Generate")(b"\xff").read(),
        lambda channel: channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff").read(),
    ],
    ids=["unary", "stream", "health"],
)
async def test_proxy_malformed_message_is_an_invalid_argument(call):
    source = Source([SMALL])
    async with served(source.stream) as channel, asyncio.timeout(LIMIT_S):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call(channel)
    assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
    assert not source.started.is_set()
