import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn

from tests.support.patience import eventually
from tests.support.service import service_of


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    """The demo pair behind a real HTTP server on loopback."""
    async with service_of() as service:
        server = uvicorn.Server(uvicorn.Config(service.app, host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        server.should_exit = True
        await serving
