"""The demo pair behind a real HTTP server on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn

from tests.support.patience import eventually
from tests.support.service import Service, service_of


@dataclass(frozen=True)
class Served:
    service: Service
    root: str  # its address, without a path

    @property
    def v1(self) -> str:
        """What clients of OpenAI's API call the base URL."""
        return f"{self.root}/v1"

    async def accepted(self, task: str) -> int:
        """Drafted tokens that stand in the answers to requests with this label, so far."""
        told = (await self.service.http.get("/loads")).json()["tasks"]
        return sum(totals["accepted"] for totals in told if totals["task"] == task)


@asynccontextmanager
async def demo_pair() -> AsyncIterator[Served]:
    async with service_of() as service:
        server = uvicorn.Server(uvicorn.Config(service.app, host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        yield Served(service, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        server.should_exit = True
        await serving
