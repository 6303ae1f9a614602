"""What a round costs beyond the steps of draft and target: `python -m bench service`.

Draft and target are processes of their own behind real gRPC, as in the service; this process is the gateway.
A round lasts from one Verdict to the next. Its overhead is what is left without the draft's and the target's
steps, each from building the batch to token ids on the host, as the workers report them. The same requests
are answered by the same models in one process too, alternating; the ratio is of tokens per second.
``--delays`` puts a relay before each worker that makes every hop so many milliseconds longer. Beside it
stands what gRPC alone takes for a round's two hops, to a process that only sends its message back, asked as
rarely.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import grpc
from tokenizers import Tokenizer

from actors.engine_loop import EngineLoop
from actors.servicers import DraftServicer, TargetServicer
from actors.worker import settle, start_server
from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.engine import CACHE_BYTES, engine_of, requests_of, run
from bench.report import save, table
from gateway.rounds.paces import Paces
from gateway.rounds.rounds import RoundsFactory
from gateway.sequence import Sequence as GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import CHANNEL_OPTIONS, DraftStream, Fleet, TargetStream
from gateway.workers.streams import Role, Worker
from outrider.demo.prompts import KINDS
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Request
from outrider.pace.settings import PaceSettings
from protos import rounds_pb2, rounds_pb2_grpc
from protos.trust import Trust
from tests.support.relay import relay

TRUST = Trust(token="of a benchmark on loopback")
FAR_AHEAD_S = 3600.0
BARE_HOPS = 60
USUAL_ROUND_S = 0.05  # of the 190 M target on two cores


def serve_worker(role: Role, settings: EngineSettings, ready: Connection) -> None:
    """A worker's process, until it is ended."""
    asyncio.run(_serve(role, EngineLoop(lambda: Engine(settings)), ready))


async def _serve(role: Role, engine_loop: EngineLoop, ready: Connection) -> None:
    engine_loop.attach(asyncio.get_running_loop())
    settle()

    def add_servicer(server: grpc.aio.Server) -> None:
        if role == "target":
            servicer = TargetServicer(engine_loop)
            rounds_pb2_grpc.add_TargetWorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        else:
            drafter = DraftServicer(engine_loop)
            rounds_pb2_grpc.add_DraftWorkerServicer_to_server(drafter, server)  # type: ignore[no-untyped-call]

    server, address = await start_server(add_servicer, "127.0.0.1", TRUST)
    ready.send((address, engine_loop.engine.vocab_size, engine_loop.engine.max_length))
    await server.wait_for_termination()


class Echo(rounds_pb2_grpc.TargetWorkerServicer):
    """A worker that does nothing."""

    async def Stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers each message at once."""
        async for _ in requests:
            yield rounds_pb2.TargetReply()


async def two_bare_hops(address: str, pause_s: float) -> float:
    """Seconds, median, there and back twice, with a pause before each."""
    async with TRUST.connect(address, CHANNEL_OPTIONS) as channel:
        stub = rounds_pb2_grpc.TargetWorkerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Stream(metadata=TRUST.metadata)
        times = []
        for _ in range(BARE_HOPS):
            begun = time.perf_counter()
            await call.write(rounds_pb2.TargetRequest())
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


@contextmanager
def process_of(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs it in a process of its own, which says by its last argument, a pipe, what it is ready with."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


@contextmanager
def worker_process(role: Role, path: str, threads: int, dtype: str, **others: float) -> Iterator[Worker]:
    """others: settings of its engine."""
    settings = EngineSettings.model_validate(
        {"model": path, "threads": threads, "dtype": dtype, "cache_memory": CACHE_BYTES, **others}
    )
    with process_of(serve_worker, role, settings) as (address, vocab_size, max_length):
        yield Worker(role, path, address, 0, "here", vocab_size, max_length)


class Clock(Fleet):
    """A Fleet that notes when Verdicts come and how long the workers say that they stepped."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(lambda: workers, TRUST)
        self.verdicts: list[tuple[float, float]] = []  # time, the target's step, seconds
        self.drafts: list[float] = []  # the draft's steps, seconds

    def open_target(self, sequence: GatewaySequence, *, apart: bool = False) -> TargetStream:
        """As the Fleet does; every reply is noted."""
        stream = super().open_target(sequence, apart=apart)
        receive = stream.receive

        async def noted(*arguments: Any) -> Any:
            reply = await receive(*arguments)
            if reply is not None:
                self.verdicts.append((time.perf_counter(), reply.timings.step_ns / 1e9))
            return reply

        stream.receive = noted  # type: ignore[assignment, method-assign]
        return stream

    def open_draft(self, sequence: GatewaySequence) -> DraftStream:
        """As the Fleet does; every Draft is noted."""
        stream = super().open_draft(sequence)
        receive = stream.receive

        async def noted(*arguments: Any) -> Any:
            reply = await receive(*arguments)
            if reply is not None:
                self.drafts.append(reply.timings.step_ns / 1e9)
            return reply

        stream.receive = noted  # type: ignore[assignment, method-assign]
        return stream

    def overheads(self) -> list[float]:
        """Of every round with a Draft, seconds; the first Verdict has none."""
        rounds = itertools.pairwise(self.verdicts)
        return [
            now - before - target_step - draft_step
            for ((before, _), (now, target_step)), draft_step in zip(rounds, self.drafts, strict=False)
        ]


async def answer(fleet: Fleet, request: Request, depth: int) -> tuple[int, ...]:
    """The tokens that the service generates."""
    sequence = GatewaySequence(request.prompt, request.sampling, request.noise_key)
    settings = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e6)
    speculation = Speculation(mode="fixed", depth=depth, drafter="model")
    deadline = asyncio.get_running_loop().time() + FAR_AHEAD_S
    rounds = RoundsFactory(fleet, Paces(PaceSettings()), settings).of(sequence, speculation, deadline)
    async for _ in rounds.steps():
        pass
    return tuple(sequence.generated)


def serve_relay(address: str, delay_s: float, ready: Connection) -> None:
    """The process of a relay, until it is ended."""

    async def serve() -> None:
        async with relay(address, delay_s) as near:
            ready.send(near)
            await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def at_distance(workers: Sequence[Worker], delay_ms: float) -> Iterator[list[Worker]]:
    """The workers behind relays; as they are where there is no delay."""
    if not delay_ms:
        yield list(workers)
        return
    with ExitStack() as stack:
        moved = []
        for worker in workers:
            address = stack.enter_context(process_of(serve_relay, worker.address, delay_ms / 1e3))
            moved.append(replace(worker, address=address))
        yield moved


async def measure_service(
    workers: Sequence[Worker], requests: Sequence[Request], depth: int
) -> tuple[float, list[float], list[tuple[int, ...]]]:
    """Seconds, overheads of the rounds in seconds, tokens."""
    outputs, overheads, seconds = [], [], 0.0
    for number, request in enumerate([requests[0], *requests]):  # the first opens the connections
        fleet = Clock(workers)
        begun = time.perf_counter()
        tokens = await answer(fleet, request, depth)
        if number:
            seconds += time.perf_counter() - begun
            outputs.append(tokens)
            overheads += fleet.overheads()
        await fleet.close()
    return seconds, overheads, outputs


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    path = str(inflated_target(arguments.target))
    tokenizer = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    requests = [
        request for kind in KINDS for request in requests_of(kind, tokenizer, 1, arguments.tokens, 0.0)
    ]
    target, draft = engine_of(path, arguments), engine_of(str(DRAFT), arguments)
    rows = []
    with (
        worker_process("target", path, arguments.threads, arguments.dtype) as target_worker,
        worker_process("draft", str(DRAFT), 1, arguments.dtype) as draft_worker,
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
