"""Worker as in production, but without Ray: an engine process and a frontend without torch.

The frontend is in this process, or in a process of its own.
"""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import actors.server
from actors.engine_client import EngineClient
from actors.engine_process import EngineProcess
from actors.process import freeze_heap, leave
from actors.server import add_servicer, start_server
from gateway.workers.streams import Role, WorkerInfo
from outrider.engine.settings import EngineSettings
from tests.support.patience import patient
from tests.support.trust import TRUST


@asynccontextmanager
async def frontend(client: EngineClient, *roles: Role) -> AsyncIterator[str]:
    """Yields the address of a worker's server for one or several roles of its engine."""

    def add_servicers(server: Any) -> None:
        for role in roles:
            add_servicer(role, client, server)

    server, address = await start_server(add_servicers, "127.0.0.1", TRUST)
    try:
        yield address
    finally:
        await server.stop(None)


@asynccontextmanager
async def process_worker(
    role: Role, settings: EngineSettings, ended: Callable[[str], object] = lambda reason: None
) -> AsyncIterator[WorkerInfo]:
    """Yields a ready worker, which trusts callers with TRUST, and stops its engine afterwards.

    ended: called in a thread with the reason if the engine's process ends unexpectedly.
    """
    async with drainable_worker(role, settings, ended) as (worker, _):
        yield worker


@asynccontextmanager
async def drainable_worker(
    role: Role, settings: EngineSettings, ended: Callable[[str], object] = lambda reason: None
) -> AsyncIterator[tuple[WorkerInfo, EngineClient]]:
    """Yields the worker of ``process_worker``, and the client by which its frontend drains the engine."""
    process = await asyncio.to_thread(EngineProcess, settings, ended)
    try:
        ready = await asyncio.to_thread(process.ready)
        client = EngineClient()
        await client.connect(process.connection)
        async with frontend(client, role) as address:
            worker = WorkerInfo(
                role,
                settings.model,
                address,
                os.getpid(),
                "here",
                ready.vocab_size,
                ready.max_length,
                (process.pid,),
                draft="model" if role == "draft" else "",
                is_exact=ready.promise.is_exact,
            )
            yield worker, client
        await client.stop()
    finally:
        await asyncio.to_thread(process.join)


@contextmanager
def process_of(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs a function in a process of its own, and yields what it sends when it is ready.

    Its last argument is the pipe to send to. Raises EOFError if the process ends before it is ready.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()  # the process has its own copy
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


@contextmanager
def worker_process(role: Role, model: Path, **settings: Any) -> Iterator[WorkerInfo]:
    """Yields a ready worker in a process of its own. settings: settings of its engine."""
    complete = EngineSettings.model_validate({"model": str(model), **settings})
    with process_of(serve_worker, role, complete) as worker:
        yield worker


def serve_worker(role: Role, settings: EngineSettings, ready: Connection) -> None:
    """Runs a worker until this process or its engine ends."""

    async def serve() -> None:
        actors.server.SERVER_OPTIONS = patient(actors.server.SERVER_OPTIONS)
        async with process_worker(role, settings, leave) as worker:
            freeze_heap()
            ready.send(worker)
            await asyncio.Event().wait()

    asyncio.run(serve())
