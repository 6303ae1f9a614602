"""What a round costs beyond the steps of draft and target: `python -m bench service`.

Draft and target are processes of their own behind real gRPC, as in the service; this process is the gateway.
A round lasts from one Verdict to the next. Its overhead is what is left without the draft's and the target's
steps (bench/answers.py); counted are the rounds that waited for a Draft. The same requests
are answered by the same models in one process too, alternating; the ratio is of tokens per second.
``--delays`` puts a relay before each worker that makes every hop so many milliseconds longer. Beside it
stands what gRPC alone takes for a round's two hops, to a process that only sends its message back, asked as
rarely.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import grpc
from tokenizers import Tokenizer

from actors.worker import start_server
from bench.answers import answer
from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.distance import at_distance
from bench.engine import CACHE_BYTES, engine_of, requests_of, run
from bench.report import save, table
from gateway.workers.streams import CHANNEL_OPTIONS, WorkerInfo
from outrider.demo.prompts import KINDS
from outrider.engine.offline.speculate import Request
from protos import rounds_pb2, rounds_pb2_grpc
from tests.support.process_worker import process_of, worker_process
from tests.support.trust import TRUST

BARE_HOPS = 60
USUAL_ROUND_S = 0.05  # of the 190 M target on two cores


class Echo(rounds_pb2_grpc.TargetWorkerServicer):
    """A worker that does nothing."""

    async def Stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers each message at once."""
        async for _ in requests:
            yield rounds_pb2.TargetReplies()


async def two_bare_hops(address: str, pause_s: float) -> float:
    """Seconds, median, there and back twice, with a pause before each."""
    async with TRUST.connect(address, CHANNEL_OPTIONS) as channel:
        stub = rounds_pb2_grpc.TargetWorkerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Stream(metadata=TRUST.metadata)
        times = []
        for _ in range(BARE_HOPS):
            begun = time.perf_counter()
            await call.write(rounds_pb2.TargetRequests())
            await call.read()
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(pause_s)
    return 2 * statistics.median(times)


def serve_echo(ready: Connection) -> None:
    """The process of an Echo, until it is ended."""

    async def serve() -> None:
        def add_servicer(server: grpc.aio.Server) -> None:
            rounds_pb2_grpc.add_TargetWorkerServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]

        server, address = await start_server(add_servicer, "127.0.0.1", TRUST)
        ready.send(address)
        await server.wait_for_termination()

    asyncio.run(serve())


async def measure_service(
    workers: Sequence[WorkerInfo], requests: Sequence[Request], depth: int
) -> tuple[float, list[float], list[tuple[int, ...]]]:
    """Seconds, overheads of the rounds that had a Draft in seconds, tokens."""
    await answer(workers, requests[0], depth)  # the first finds nothing warm
    runs = [await answer(workers, request, depth) for request in requests]
    overheads = [
        parts["gateway"] + parts["wire"] + parts["wait"]
        for one in runs
        for parts in one.rounds
        if parts["draft"]
    ]
    return sum(one.total_s for one in runs), overheads, [one.generated for one in runs]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    path = inflated_target(arguments.target)
    tokenizer = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    requests = [
        request for kind in KINDS for request in requests_of(kind, tokenizer, 1, arguments.tokens, 0.0)
    ]
    target, draft = engine_of(str(path), arguments), engine_of(str(DRAFT), arguments)
    shared = {"dtype": arguments.dtype, "cache_memory": CACHE_BYTES}
    rows = []
    with (
        worker_process("target", path, threads=arguments.threads, **shared) as target_worker,
        worker_process("draft", DRAFT, threads=1, **shared) as draft_worker,
    ):
        workers = [target_worker, draft_worker]
        for delay_ms in arguments.delays:
            with (
                process_of(serve_echo) as address,
                at_distance([replace(target_worker, address=address)], delay_ms) as echo,
            ):
                bare_ms = 1e3 * asyncio.run(two_bare_hops(echo[0].address, USUAL_ROUND_S))
            ratios, overheads = [], []
            for _ in range(arguments.repetitions):
                together = [run(target, draft, [request], arguments.depth) for request in requests]
                with at_distance(workers, delay_ms) as moved:
                    seconds, added, outputs = asyncio.run(measure_service(moved, requests, arguments.depth))
                ratios.append(sum(part.seconds for part in together) / seconds)
                overheads += added
                same = sum(part.outputs[0].tokens == out for part, out in zip(together, outputs, strict=True))
            rows.append(
                {
                    "delay per hop, ms": delay_ms,
                    "depth": arguments.depth,
                    "overhead per round, ms": 1e3 * statistics.median(overheads),
                    "90th percentile, ms": 1e3 * statistics.quantiles(overheads, n=10)[-1],
                    "two bare hops, ms": bare_ms,
                    "rounds": len(overheads),
                    "service / one process": statistics.median(ratios),
                    "same tokens": same,
                    "requests": len(requests),
                }
            )
            print(table(rows[-1:]), flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench service", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=INFLATED, default="190M")
    parser.add_argument("--threads", type=int, default=2, help="of the target; the draft has one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="generated per request, one request per kind")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.3, 2.0, 10.0], help="ms per hop")
    options = parser.parse_args(arguments)
    rows = measure(options)
    print(save("service", rows))
