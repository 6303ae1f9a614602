"""A real engine with a small random model behind a real gRPC server on loopback."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from actors.engine_loop import EngineLoop
from actors.servicers import DraftServicer, TargetServicer
from actors.worker import start_server
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from protos import rounds_pb2_grpc
from tests.support.checkpoints import write_checkpoint
from tests.support.trust import TRUST


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return Engine.from_settings(EngineSettings(model=str(folder), block_size=8, cache_memory=2**22))


@pytest.fixture
async def channel(engine: Engine) -> AsyncIterator[grpc.aio.Channel]:
    """To a server that is target and draft worker at once; they share the engine."""
    engine_loop = EngineLoop(lambda: engine)
    engine_loop.attach(asyncio.get_running_loop())

    def add_servicers(server: grpc.aio.Server) -> None:
        rounds_pb2_grpc.add_TargetWorkerServicer_to_server(TargetServicer(engine_loop), server)
        rounds_pb2_grpc.add_DraftWorkerServicer_to_server(DraftServicer(engine_loop), server)

    server, address = await start_server(add_servicers, "127.0.0.1", TRUST)
    async with TRUST.connect(address, ()) as channel:
        yield channel
    await server.stop(None)
    engine_loop.stop()
