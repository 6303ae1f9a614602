"""A worker as users have it, without Ray: the engine in a process of its own, and a front without torch."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from actors.engine_client import EngineClient
from actors.engine_process import EngineProcess
from actors.servicers import add_servicer
from actors.worker import start_server
from gateway.workers.streams import Role, Worker
from outrider.engine.settings import EngineSettings
from tests.support.trust import TRUST


@asynccontextmanager
async def front(client: EngineClient, *roles: Role) -> AsyncIterator[str]:
    """The address of a worker's server, of several roles where the engine is to serve them all."""

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
) -> AsyncIterator[Worker]:
    """The worker, once it is ready; it trusts those who have TRUST. Its engine is gone afterwards.

    ended: called with the reason when the engine's process has ended without being told to; in a thread.
    """
    process = await asyncio.to_thread(EngineProcess, settings, ended)
    try:
        ready = await asyncio.to_thread(process.ready)
        client = EngineClient()
        await client.connect(process.connection)
        async with front(client, role) as address:
            yield Worker(
                role,
                settings.model,
                address,
                os.getpid(),
                "here",
                ready.vocab_size,
                ready.max_length,
                (process.pid,),
                draft="model" if role == "draft" else "",
            )
        await client.stop()
    finally:
        await asyncio.to_thread(process.join)
