"""What messages cost, where every sequence has a stream of its own and where all share one.

`python -m bench wire` has a gateway and a target in processes of their own, with nothing behind the messages.
In each step every sequence verifies a Draft of four tokens, and all wait for the last one, as for a step of
the engine. It tells how long a step takes, and the processor time of each side.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil  # type: ignore[import-untyped]

from bench.report import save, table
from protos import rounds_pb2
from tests.support.process_worker import process_of

WARM_UP = 20  # steps
DRAFT = rounds_pb2.Draft(tokens=[11, 12, 13, 14], parents=[-1, 0, 1, 2])


def request(sequence: int, round_number: int) -> rounds_pb2.TargetRequest:
    turn = rounds_pb2.Turn(round=round_number, base=100 + 4 * round_number, tokens=[5, 6, 7, 8])
    verify = rounds_pb2.Verify(turn=turn, draft=DRAFT)
    return rounds_pb2.TargetRequest(sequence=sequence, epoch=1, verify=verify)


def reply(asked: rounds_pb2.TargetRequest) -> rounds_pb2.TargetReply:
    step = rounds_pb2.Step(number=1, ns=10**7, sequences=128, tokens=640)
    return rounds_pb2.TargetReply(
        sequence=asked.sequence,
        epoch=asked.epoch,
        round=asked.verify.turn.round,
        accepted=[0, 1, 2],
        tokens=[11, 12, 13, 9],
        timings=rounds_pb2.Timings(queue_ns=5000, step_ns=10**7, total_ns=10**7, last_step=step),
        load=rounds_pb2.Load(decoding=128, running=128, free_blocks=1000, total_blocks=2000),
    )


def serve(sequences: int, ready: Connection) -> None:
    """The process of the target, until it is ended."""
    asyncio.run(_serve(sequences, ready))


async def _serve(sequences: int, ready: Connection) -> None:
    waiting: list[tuple[Any, rounds_pb2.TargetReply]] = []

    async def stream_each(requests: AsyncIterator[rounds_pb2.TargetRequest], context: Any) -> None:
        async for asked in requests:
            waiting.append((context, reply(asked)))
            if len(waiting) == sequences:
                answers, waiting[:] = list(waiting), []
                await asyncio.gather(*(stream.write(answer) for stream, answer in answers))

    async def stream_of_all(requests: AsyncIterator[Any], context: Any) -> None:
        async for asked in requests:
            await context.write(rounds_pb2.TargetReplies(replies=[reply(one) for one in asked.requests]))

    target = rounds_pb2.TargetRequest, rounds_pb2.TargetReply
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(stream, taken.FromString, given.SerializeToString)
        for name, stream, (taken, given) in (
            ("Each", stream_each, target),
            ("All", stream_of_all, (rounds_pb2.TargetRequests, rounds_pb2.TargetReplies)),
        )
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Wire", handlers),))
    ready.send((server.add_insecure_port("127.0.0.1:0"), os.getpid()))
    await server.start()
    await server.wait_for_termination()


async def a_stream_each(channel: grpc.aio.Channel, sequences: int) -> Callable[[int], Any]:
    method: Any = channel.stream_stream(
        "/bench.Wire/Each", rounds_pb2.TargetRequest.SerializeToString, rounds_pb2.TargetReply.FromString
    )
    calls: list[Any] = [method() for _ in range(sequences)]

    async def one(number: int, round_number: int) -> None:
        await calls[number].write(request(number, round_number))
        assert (await calls[number].read()).round == round_number

    async def step(round_number: int) -> None:
        await asyncio.gather(*(one(number, round_number) for number in range(sequences)))

    return step


async def one_stream(channel: grpc.aio.Channel, sequences: int) -> Callable[[int], Any]:
    several, told = rounds_pb2.TargetRequests, rounds_pb2.TargetReplies
    method: Any = channel.stream_stream("/bench.Wire/All", several.SerializeToString, told.FromString)
    call: Any = method()

    async def step(round_number: int) -> None:
        asked = [request(number, round_number) for number in range(sequences)]
        await call.write(rounds_pb2.TargetRequests(requests=asked))
        assert all(answer.round == round_number for answer in (await call.read()).replies)

    return step


async def measure(
    port: int, server: psutil.Process, way: Any, sequences: int, steps: int
) -> dict[str, float]:
    def spent() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), sum(server.cpu_times()[:2])

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        step = await way(channel, sequences)
        for round_number in range(WARM_UP):
            await step(round_number)
        before = spent()
        for round_number in range(WARM_UP, WARM_UP + steps):
            await step(round_number)
        took, gateway, target = (after - start for after, start in zip(spent(), before, strict=True))
    return {"step ms": took, "gateway ms": gateway, "target ms": target}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench wire", description="What messages cost per step.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = []
    for sequences in options.sequences:
        with process_of(serve, sequences) as (port, process_id):
            server = psutil.Process(process_id)
            for name, way in (("a stream each", a_stream_each), ("one stream", one_stream)):
                taken = [
                    asyncio.run(measure(port, server, way, sequences, options.steps))
                    for _ in range(options.repetitions)
                ]
                medians = {
                    key: statistics.median(one[key] for one in taken) / options.steps * 1e3
                    for key in taken[0]
                }
                rows.append({"sequences": sequences, "messages": name, **medians})
    print(table(rows))
    print(save("wire", rows))
