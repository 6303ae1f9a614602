"""Whole service in one process, without Ray: real engines with the demo pair behind real gRPC.

Tests use the public APIs like clients: HTTP over ASGI, gRPC over a channel.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from fastapi import FastAPI

from gateway.api import http_api
from gateway.api.access import Authentication
from gateway.api.direct import direct_server
from gateway.api.grpc_api import GenerationServicer
from gateway.api.openai.chat_template import load_chat_template
from gateway.api.openai.rendering import ChatPrompts
from gateway.generation.generation import Generation
from gateway.generation.vocabulary import load_tokenizer
from gateway.settings import GatewaySettings
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from outrider.demo.prompts import DEMO
from outrider.engine.settings import EngineSettings
from tests.support.local_worker import LocalWorker, local_worker
from tests.support.patience import PATIENCE
from tests.support.trust import TRUST

MODEL = "m"  # name of the target in requests
ANYBODY = Authentication((), anonymous=True)  # allows all callers
QUIET_S = 20.0 * PATIENCE  # seconds until everything that clients have left is freed


@dataclass(frozen=True)
class Service:
    app: FastAPI
    http: httpx.AsyncClient  # client of the app
    channel: grpc.aio.Channel  # channel to the public gRPC API
    generation: Generation
    workers: list[LocalWorker]
    others: list[WorkerInfo] = field(default_factory=list)  # other workers that the gateway finds

    def of(self, role: Role) -> list[LocalWorker]:
        return [worker for worker in self.workers if worker.role == role]

    async def quiet(self) -> None:
        """Waits until everything that was open is freed. Raises TimeoutError."""
        async with asyncio.timeout(QUIET_S):
            for worker in self.workers:
                while not await worker.is_idle():
                    await asyncio.sleep(0.005)


@asynccontextmanager
async def service_of(
    *,
    targets: int = 1,
    drafts: int = 1,
    target: Mapping[str, Any] | None = None,
    draft: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> AsyncIterator[Service]:
    """Yields a ready service, and frees everything afterwards.

    Args:
        targets: number of target workers, each with an engine.
        drafts: number of draft workers.
        target: settings of the targets' engines that differ from the defaults of tests.
        draft: settings of the drafts' engines that differ from the defaults of tests.
        gateway: further settings of the gateway.
    """
    async with AsyncExitStack() as ending:
        settings: dict[Role, dict[str, Any]] = {"target": dict(target or {}), "draft": dict(draft or {})}
        settings["draft"].setdefault("draft_ahead", 8)
        counts: dict[Role, int] = {"target": targets, "draft": drafts}
        roles = [role for role, count in counts.items() for _ in range(count)]
        workers = [
            await ending.enter_async_context(local_worker(role, engine_settings(role, **settings[role])))
            for role in roles
        ]
        others: list[WorkerInfo] = []
        fleet = Fleet(lambda: [*(worker.published for worker in workers), *others], TRUST)
        ending.push_async_callback(fleet.close)
        folder = str(DEMO / "target")
        generation = Generation(
            GatewaySettings(model=MODEL, tokenizer=folder, **(gateway or {})), load_tokenizer(folder), fleet
        )
        app = http_api.build(generation, load_chat_template(folder), ANYBODY)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = await ending.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60)
        )
        address = await ending.enter_async_context(public_grpc(generation, folder))
        channel = await ending.enter_async_context(grpc.aio.insecure_channel(address))
        yield Service(app, http, channel, generation, workers, others)


def engine_settings(role: Role, **settings: Any) -> EngineSettings:
    """Returns engine settings for tests: float32, so that texts are exactly equal."""
    model = str(DEMO / role)
    defaults = {"model": model, "dtype": "float32", "device": "cpu", "threads": 1, "cache_memory": 2**25}
    return EngineSettings.model_validate({**defaults, **settings})


@asynccontextmanager
async def public_grpc(generation: Generation, tokenizer: str) -> AsyncIterator[str]:
    """Yields host:port of the public API behind a gRPC server, as in Serve's proxy.

    tokenizer: folder with the chat template.
    """
    servicer = GenerationServicer()
    servicer.chat_prompts = ChatPrompts.of(load_chat_template(tokenizer), generation)
    servicer.generation, servicer.authentication = generation, ANYBODY
    server, port = direct_server(servicer, "127.0.0.1:0", -1)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
