"""Draft and target workers behind real gRPC, without Ray: a frontend and a real engine."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from actors.connection import Connection
from actors.engine_client import EngineClient
from actors.engine_loop import EngineLoop
from actors.messages import decode_to_engine
from gateway.workers.streams import Role, WorkerInfo
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.process_worker import frontend


class LocalEngine:
    """Engine in a thread of this process, which a test can access, with the frontend's connection to it."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Waits until the engine is built. Raises the error of ``build``."""
        self.failure: BaseException | None = None
        self.connection, engine_end = socket.socketpair()
        built: Future[Engine] = Future()
        self.thread = threading.Thread(target=self._run, args=(build, built, engine_end), daemon=True)
        self.thread.start()
        self.engine = built.result()

    def join(self) -> None:
        """Waits for the thread, after the engine was told to stop."""
        self.thread.join()

    def _run(self, build: Callable[[], Engine], built: "Future[Engine]", engine_end: socket.socket) -> None:
        with closing(engine_end):
            try:
                engine = build()
            except BaseException as error:
                built.set_exception(error)
                return
            loop = EngineLoop(engine, Connection(engine_end, decode_to_engine))
            built.set_result(engine)
            try:
                loop.run()
            except BaseException as error:
                self.failure = error


@dataclass(frozen=True)
class LocalWorker:
    """Worker: its published information, the frontend's client of the engine, and the engine."""

    published: WorkerInfo
    client: EngineClient
    behind: LocalEngine

    @property
    def role(self) -> Role:
        return self.published.role

    @property
    def address(self) -> str:
        return self.published.address

    @property
    def engine(self) -> Engine:
        return self.behind.engine

    async def is_idle(self) -> bool:
        """Whether no sequence is open and every cache block is free."""
        load = (await self.client.report()).load
        return self.client.open_sequences == 0 and load.free_blocks == load.total_blocks


@asynccontextmanager
async def local_engine(build: Callable[[], Engine]) -> AsyncIterator[tuple[EngineClient, LocalEngine]]:
    """Yields an engine and its client after it was built, and stops it afterwards."""
    behind = await asyncio.to_thread(LocalEngine, build)
    client = EngineClient()
    await client.connect(behind.connection)
    try:
        yield client, behind
    finally:
        await client.stop()
        await asyncio.to_thread(behind.join)


@asynccontextmanager
async def local_worker(role: Role, settings: EngineSettings) -> AsyncIterator[LocalWorker]:
    """Yields a ready worker, which trusts callers with TRUST, and stops its engine afterwards."""
    async with (
        local_engine(lambda: Engine.from_settings(settings)) as (client, behind),
        frontend(client, role) as address,
    ):
        engine = behind.engine
        published = WorkerInfo(
            role,
            settings.model,
            address,
            0,
            "here",
            engine.vocab_size,
            engine.max_length,
            draft="model" if role == "draft" else "",
            is_exact=engine.runner.promise.is_exact,
        )
        yield LocalWorker(published, client, behind)
