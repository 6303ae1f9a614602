import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest_asyncio
import uvicorn
from fastapi import FastAPI

from tests.support.patience import eventually
from tests.support.planted import Services, services


@asynccontextmanager
async def base_url(app: FastAPI) -> AsyncIterator[str]:
    """Address of the app behind a real HTTP server on loopback."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Services]:
    """The same demo pair twice."""
    async with services() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses(both: Services) -> AsyncIterator[tuple[str, str]]:
    async with base_url(both.a.app) as a, base_url(both.b.app) as b:
        yield a, b
