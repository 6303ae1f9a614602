"""A draft or target worker in this process: a real engine behind real gRPC, without Ray."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from actors.engine_loop import EngineLoop
from actors.servicers import DraftServicer, TargetServicer
from actors.worker import start_server
from gateway.workers.streams import Role, Worker
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from protos import rounds_pb2_grpc
from tests.support.trust import TRUST

_SERVICERS: dict[Role, Any] = {
    "target": (TargetServicer, rounds_pb2_grpc.add_TargetWorkerServicer_to_server),
    "draft": (DraftServicer, rounds_pb2_grpc.add_DraftWorkerServicer_to_server),
}


@dataclass(frozen=True)
class LocalWorker:
    """What it publishes, and the engine behind it."""

    published: Worker
    engine_loop: EngineLoop

    @property
    def role(self) -> Role:
        return self.published.role

    @property
    def address(self) -> str:
        return self.published.address

    async def is_idle(self) -> bool:
        """Nothing is open there, and every block of its cache can be given out again."""
        load = await self.engine_loop.load()
        return self.engine_loop.open_sequences == 0 and load.free_blocks == load.total_blocks


@asynccontextmanager
async def local_worker(role: Role, settings: EngineSettings) -> AsyncIterator[LocalWorker]:
    """The worker, once it is ready; it trusts those who have TRUST. Its engine is gone afterwards."""
    engine_loop = await asyncio.to_thread(EngineLoop, lambda: Engine.from_settings(settings))
    engine_loop.attach(asyncio.get_running_loop())
    servicer, add_to = _SERVICERS[role]
    server, address = await start_server(
        lambda server: add_to(servicer(engine_loop), server), "127.0.0.1", TRUST
    )
    engine = engine_loop.engine
    try:
        published = Worker(role, settings.model, address, 0, "here", engine.vocab_size, engine.max_length)
        yield LocalWorker(published, engine_loop)
    finally:
        await server.stop(None)
        await asyncio.to_thread(engine_loop.stop)
