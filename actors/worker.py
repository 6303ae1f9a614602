"""Draft and target workers: an engine behind a gRPC server of its own, inside a Serve replica.

The process that deploys them imports this module for their names alone. So what takes torch is imported where
it is used, by the replicas.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
import ray

from actors.leaving import leave
from actors.usage import CACHE_IN_USE, SEQUENCES
from outrider.engine.settings import EngineSettings
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_WORKERS
from protos import rounds_pb2_grpc
from protos.trust import Trust

if TYPE_CHECKING:
    from actors.engine_loop import EngineLoop
    from outrider.engine.engine import Engine

logger = logging.getLogger("ray.serve")

PUBLISH_S = 1.0  # between two reports of the worker's metrics
STOP_GRACE_S = 2.0  # for streams under way when the replica is told to leave


async def start_server(
    add_servicer: Callable[[grpc.aio.Server], None], host: str, trust: Trust
) -> tuple[grpc.aio.Server, str]:
    """A server on a free port of ``host``, and its address. Only the deployment's gateways are let in."""
    server = grpc.aio.server(
        interceptors=[trust.guard()],
        options=[
            ("grpc.max_receive_message_length", -1),
            # Gateways ping once a second, also while nothing is sent; a silent one is dropped as fast.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.http2.ping_timeout_ms", 1000),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    )
    add_servicer(server)
    port = trust.listen(server, f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"


@contextmanager
def importing() -> Iterator[None]:
    """For imports of thousands of modules: the garbage collector would take a fifth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """To be called when all is loaded, which is to stay.

    The garbage collector would go over it again and again, a quarter of a second in which no stream moves.
    """
    gc.collect()
    gc.freeze()


class Worker:
    """One engine, one server, one Serve replica."""

    role: ClassVar[str]
    ranks: tuple[int, ...] = ()  # process ids beside this one

    def __init__(
        self, settings: EngineSettings, trust: Trust, start_tracing: Callable[[], Callable[[], None]]
    ) -> None:
        """start_tracing: for this process; returns what ends it."""
        begun = time.perf_counter()
        with importing():
            from actors.engine_loop import EngineLoop
            from actors.watchdog import loading, watch
        imported = time.perf_counter()
        self._leaving = AsyncExitStack()  # ends what has been started, the last first
        self._leaving.callback(start_tracing())
        self._trust = trust
        with loading(settings.load_timeout_s, leave):
            self._engine_loop = EngineLoop(lambda: self.build(settings))
        self._leaving.callback(self._engine_loop.stop)
        watch(self._engine_loop, settings.step_timeout_s)
        self._engine = self._engine_loop.engine
        settle()
        logger.info(
            "%s worker: %s with %d threads, %d tokens in a sequence; imports %.2f s, %s",
            self.role,
            settings.model,
            self._engine.settings.threads,
            self._engine.max_length,
            imported - begun,
            self._engine.load_timings,
        )

    def build(self, settings: EngineSettings) -> "Engine":
        """The engine, in the thread that will drive it."""
        from outrider.engine.engine import Engine

        return Engine.from_settings(settings)

    def add_servicer(self, engine_loop: "EngineLoop", server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Serve calls this once at start and tells every gateway: here the worker begins to serve."""
        self._engine_loop.attach(asyncio.get_running_loop())
        self._publishing = asyncio.create_task(self._publish())
        host = ray.util.get_node_ip_address()
        server, address = await start_server(
            lambda server: self.add_servicer(self._engine_loop, server), host, self._trust
        )
        self._leaving.push_async_callback(server.stop, STOP_GRACE_S)
        self._leaving.callback(self._engine_loop.leave)  # first: gateways go on elsewhere at once
        return {
            "role": self.role,
            "model": self._engine.settings.model,
            "address": address,
            "pid": os.getpid(),
            "ranks": self.ranks,
            "node": ray.get_runtime_context().get_node_id(),
            "vocab_size": self._engine.vocab_size,
            "max_length": self._engine.max_length,
            "settings": self._engine.settings.model_dump(exclude={"model"}),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it now and then where the deployment scales."""
        load = await self._engine_loop.load()
        return {
            SEQUENCES: self._engine_loop.open_sequences,
            CACHE_IN_USE: 1 - load.free_blocks / load.total_blocks,
        }

    async def _publish(self) -> None:
        from actors.metrics import EngineMetrics

        metrics = EngineMetrics(self._engine, Instruments(OF_WORKERS), self.role)
        self._engine_loop.after_each_step(metrics.stepped)
        while True:
            self._engine_loop.command(metrics.publish)
            await asyncio.sleep(PUBLISH_S)

    async def __del__(self) -> None:
        """Serve awaits it before the replica ends, one that could not be built too."""
        await self._leaving.aclose()


class DraftWorker(Worker):
    role = "draft"

    def add_servicer(self, engine_loop: "EngineLoop", server: grpc.aio.Server) -> None:
        from actors.servicers import DraftServicer

        rounds_pb2_grpc.add_DraftWorkerServicer_to_server(  # type: ignore[no-untyped-call]
            DraftServicer(engine_loop), server
        )


class TargetWorker(Worker):
    role = "target"

    def build(self, settings: EngineSettings) -> "Engine":
        if settings.tensor_parallel == 1:
            return super().build(settings)
        from actors.rank import OtherRanks
        from outrider.engine.engine import Engine

        others = OtherRanks(settings)
        self.ranks = others.pids
        return Engine.from_settings(settings, others.join())

    def add_servicer(self, engine_loop: "EngineLoop", server: grpc.aio.Server) -> None:
        from actors.servicers import TargetServicer

        rounds_pb2_grpc.add_TargetWorkerServicer_to_server(  # type: ignore[no-untyped-call]
            TargetServicer(engine_loop), server
        )
