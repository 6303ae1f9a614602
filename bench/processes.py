"""Draft and target as in the service, without Ray: front and engine in processes of their own, real gRPC."""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.garbage import settle
from actors.leaving import leave
from gateway.workers.streams import Role, Worker
from outrider.engine.settings import EngineSettings
from tests.support.process_worker import process_worker
from tests.support.relay import relay


@contextmanager
def process_of(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs it in a process of its own, which says by its last argument, a pipe, what it is ready with.

    Raises EOFError where it ends before that.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()  # the process has its own
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
    """The process of a worker, until it is ended, or its engine is."""

    async def serve() -> None:
        async with process_worker(role, settings, leave) as worker:
            settle()
            ready.send(worker)
            await asyncio.Event().wait()

    asyncio.run(serve())


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
