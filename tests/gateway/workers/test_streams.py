"""A stream that ends at the gateway ends at its worker, which would hold the sequence for ever."""

import asyncio
from contextlib import suppress

import grpc
import pytest

from gateway.errors import WorkerLostError
from gateway.sequence import GatewaySequence
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.decoding.settings import Sampling
from protos import rounds_pb2, rounds_pb2_grpc
from tests.fakes.conversations import serve
from tests.fakes.scripted import PINGED, TRUST
from tests.support.patience import eventually

STREAMS = 400


class Talkative(rounds_pb2_grpc.TargetWorkerServicer):
    """Answers each turn three times, so that its messages cross those of the gateway."""

    def __init__(self) -> None:
        self.open = 0

    async def Stream(self, requests, context):  # noqa: N802
        await serve(requests, context, rounds_pb2.TargetReplies, self._converse)

    async def _converse(self, requests):
        self.open += 1
        try:
            async for request in requests:
                for _ in range(3 * request.HasField("decode")):
                    yield rounds_pb2.TargetReply(round=request.decode.turn.round)
        finally:
            self.open -= 1


@pytest.fixture
async def talkative():
    server, worker = grpc.aio.server(options=PINGED), Talkative()
    rounds_pb2_grpc.add_TargetWorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    fleet = Fleet(lambda: [WorkerInfo("target", "m", address, 1, "node", 256, 2048)], TRUST)
    yield worker, fleet
    await fleet.close()
    await server.stop(None)


def turn_of(stream, number: int) -> None:
    decode = rounds_pb2.Decode(turn=stream.turn(number), lease=rounds_pb2.Lease(until=99))
    stream.send(rounds_pb2.TargetWorkerRequest(decode=decode))


async def end(fleet, number: int, crossing: str) -> None:
    stream = fleet.open_target(GatewaySequence((1, 2, 3), Sampling(), noise_key=number))
    with suppress(WorkerLostError):
        for round_ in (1, 2):
            turn_of(stream, round_)
            await stream.receive(round_)
        if crossing == "a turn":
            turn_of(stream, 3)
        for _ in range(number % 3):
            await asyncio.sleep(0)
        stream.close()


@pytest.mark.parametrize("crossing", ["a turn", "nothing"])
async def test_stream_closed_while_messages_cross_reaches_the_worker(talkative, crossing):
    worker, fleet = talkative
    for first in range(0, STREAMS, 20):
        await asyncio.gather(*(end(fleet, number, crossing) for number in range(first, first + 20)))
    await eventually(lambda: worker.open == 0)


async def test_stream_closed_at_once_reaches_the_worker(talkative):
    worker, fleet = talkative
    stream = fleet.open_target(GatewaySequence((1, 2, 3), Sampling(), noise_key=1))
    turn_of(stream, 1)
    stream.close()
    other = fleet.open_target(GatewaySequence((1, 2, 3), Sampling(), noise_key=2))
    turn_of(other, 1)
    await other.receive(1)
    await eventually(lambda: worker.open == 1)
    other.close()
    await eventually(lambda: worker.open == 0)
