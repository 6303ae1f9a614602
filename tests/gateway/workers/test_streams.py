"""However a stream ends at the gateway, its worker hears of it: it would hold the sequence for ever."""

import asyncio
from contextlib import suppress

import grpc
import pytest

from gateway.errors import WorkerLostError
from gateway.sequence import Sequence
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Worker
from outrider.decoding.settings import Sampling
from protos import rounds_pb2, rounds_pb2_grpc
from tests.fakes.scripted import PINGED, TRUST
from tests.support.patience import eventually

STREAMS = 400


class Talkative(rounds_pb2_grpc.TargetWorkerServicer):
    """Answers each turn three times, so that its messages cross those of the gateway."""

    def __init__(self) -> None:
        self.open = 0

    async def Stream(self, requests, context):  # noqa: N802
        self.open += 1
        try:
            async for request in requests:
                if request.HasField("close"):
                    return
                for _ in range(3 * request.HasField("plain")):
                    await context.write(rounds_pb2.TargetReply(round=request.plain.turn.round))
        finally:
            self.open -= 1


@pytest.fixture
async def talkative():
    server, worker = grpc.aio.server(options=PINGED), Talkative()
    rounds_pb2_grpc.add_TargetWorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    fleet = Fleet(lambda: [Worker("target", "m", address, 1, "node", 256, 2048)], TRUST)
    yield worker, fleet
    await fleet.close()
    await server.stop(None)


async def turn_of(stream, number: int) -> None:
    plain = rounds_pb2.Plain(turn=stream.turn(number), until=99)
    await stream.send(rounds_pb2.TargetRequest(plain=plain))


async def end(fleet, number: int, crossing: str) -> None:
    sequence = Sequence((1, 2, 3), Sampling(), noise_key=number)
    stream = fleet.open_target(sequence)
    with suppress(WorkerLostError):
        for round_ in (1, 2):
            await turn_of(stream, round_)
            await stream.receive(round_)
        sending = asyncio.create_task(turn_of(stream, 3))
        for _ in range(number % 3):
            await asyncio.sleep(0)
        if crossing == "a send that is given up":
            sending.cancel()
        sequence.finish_reason = None if crossing == "nothing said" else "stop"
        await stream.aclose()
        await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize("crossing", ["a send", "a send that is given up", "nothing said"])
async def test_a_worker_hears_of_the_end_whatever_crosses_it(talkative, crossing):
    worker, fleet = talkative
    for first in range(0, STREAMS, 20):
        await asyncio.gather(*(end(fleet, number, crossing) for number in range(first, first + 20)))
    await eventually(lambda: worker.open == 0)
