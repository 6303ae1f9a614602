"""A connection that makes no sense is over at once: what waits for replies must not wait for ever."""

from contextlib import asynccontextmanager

import grpc
import pytest

from gateway.errors import WorkerLostError
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from tests.fakes.scripted import PINGED, TRUST

TARGET_WORKER = "outrider.rounds.v1.TargetWorker"
GARBLED, EMPTY = b"\xff\xff", b""
LONG_S = 10.0  # on a busy machine too


@asynccontextmanager
async def fleet_of_one_that_says(messages):
    """Sends these messages after each request."""

    async def stream(requests, context):
        async for _ in requests:
            for message in messages:
                yield message

    handler = grpc.stream_stream_rpc_method_handler(stream, rounds_pb2.TargetWorkerRequests.FromString, None)
    server = grpc.aio.server(options=PINGED)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(TARGET_WORKER, {"Stream": handler}),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    fleet = Fleet(lambda: [WorkerInfo("target", "m", address, 1, "node", 256, 2048)], TRUST)
    try:
        yield fleet
    finally:
        await fleet.close()
        await server.stop(None)


@pytest.mark.parametrize("messages", [[GARBLED], [GARBLED, EMPTY]], ids=["alone", "before another"])
async def test_connection_unreadable_message_ends(messages):
    async with fleet_of_one_that_says(messages) as fleet:
        stream = fleet.open_target(GatewaySequence((1, 2, 3), Sampling(), noise_key=1))
        stream.send(
            rounds_pb2.TargetWorkerRequest(
                decode=rounds_pb2.Decode(turn=stream.turn(1), lease=rounds_pb2.Lease(until=99))
            )
        )
        with pytest.raises(WorkerLostError, match="cannot be read"):
            await stream.receive(1, LONG_S)
        stream.close()
