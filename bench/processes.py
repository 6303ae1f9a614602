"""Draft and target as processes of their own behind real gRPC, as in the service, without Ray."""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from actors.engine_loop import EngineLoop
from actors.servicers import DraftServicer, TargetServicer
from actors.worker import settle, start_server
from gateway.workers.streams import Role, Worker
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from protos import rounds_pb2_grpc
from protos.trust import Trust
from tests.support.relay import relay

TRUST = Trust(token="of a benchmark on loopback")


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
def worker_process(role: Role, model: Path, **settings: Any) -> Iterator[Worker]:
    """A worker, once it is ready. settings: of its engine."""
    complete = EngineSettings.model_validate({"model": str(model), **settings})
    with process_of(serve_worker, role, complete) as worker:
        yield worker


def serve_worker(role: Role, settings: EngineSettings, ready: Connection) -> None:
    """A worker's process, until it is ended."""
    asyncio.run(_serve(role, settings, EngineLoop(lambda: Engine.from_settings(settings)), ready))


async def _serve(role: Role, settings: EngineSettings, engine_loop: EngineLoop, ready: Connection) -> None:
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
    engine = engine_loop.engine
    ready.send(Worker(role, settings.model, address, 0, "here", engine.vocab_size, engine.max_length))
    await server.wait_for_termination()


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
