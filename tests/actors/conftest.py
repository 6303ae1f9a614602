"""A real engine with a small random model behind a real gRPC server on loopback."""

from collections.abc import AsyncIterator

import grpc
import pytest

from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.local_worker import local_engine
from tests.support.process_worker import frontend
from tests.support.trust import TRUST


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return Engine.from_settings(EngineSettings(model=str(folder), block_size=8, cache_memory=2**22))


@pytest.fixture
async def channel(engine: Engine) -> AsyncIterator[grpc.aio.Channel]:
    """Connection to a server that is target and draft worker at once; they share the engine."""
    async with (
        local_engine(lambda: engine) as (client, _),
        frontend(client, "target", "draft") as address,
        TRUST.connect(address, ()) as channel,
    ):
        yield channel
