"""Draft and target workers: a gRPC server inside a Serve replica, and an engine in its own process.

Nothing here imports torch: only the engine's process and the ranks that share its model do.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar

import ray
from msgspec import structs

from actors.engine_client import EngineClient, EngineStoppedError, LeavingError
from actors.engine_process import EngineProcess
from actors.messages import ProcessPlace, Ready
from actors.metrics import CACHE_IN_USE, FIRST_TOKEN, SEQUENCES, EngineMetrics
from actors.place import gpus_given, with_threads
from actors.process import freeze_heap, leave
from actors.rank import OtherRanks, node_here
from actors.server import Role, add_servicer, start_server
from outrider.engine.settings import EngineSettings
from outrider.receipts.digests import tokenizer_digest, weights_digest
from outrider.telemetry.debug_lines import show_debug_lines
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_WORKERS
from protos.trust import Trust

logger = logging.getLogger(f"ray.serve.{__name__}")

PUBLISH_S = 1.0  # interval of reports of the worker's metrics
DRAIN_S = 10.0  # seconds for the sequences of a target to move; Serve ends a replica after 20
STOP_GRACE_S = 2.0  # seconds for open streams to end when the replica ends


class Worker:
    """Serve replica: a gRPC server, and behind it an engine in a process of its own."""

    role: ClassVar[Role]
    places: tuple[ProcessPlace, ...]  # places of the engine's processes, rank 0 first

    def __init__(
        self, settings: EngineSettings, trust: Trust, start_tracing: Callable[[], Callable[[], None]]
    ) -> None:
        """start_tracing: starts tracing in this process; returns a function that ends it."""
        show_debug_lines()
        self._leaving = AsyncExitStack()  # stops everything that was started, in reverse order
        self._leaving.callback(start_tracing())
        self._trust = trust
        self._engine, self._ready = self.start(settings)
        freeze_heap()
        logger.info(
            "%s worker: %s with %d threads, %d tokens in a sequence; imports %.2f s, %s",
            self.role,
            settings.model,
            self._ready.settings.threads,
            self._ready.max_length,
            self._ready.imports_s,
            self._ready.load_timings,
        )

    def start(self, settings: EngineSettings) -> tuple[EngineProcess, Ready]:
        """Returns the loaded engine. This process ends as soon as the engine's process does."""
        engine = EngineProcess(settings, leave, gpus_given())
        self._leaving.callback(engine.join)
        ready = engine.ready()
        self.places = (engine.place,)
        return engine, ready

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Starts to serve. Serve calls this once at start and passes the result to every gateway."""
        metrics = EngineMetrics(Instruments(OF_WORKERS), self.role, self._ready.settings.device)
        self._client = EngineClient(metrics.stepped)
        await self._client.connect(self._engine.connection)
        self._client.end.add_done_callback(_leave_unless_drained)
        self._leaving.push_async_callback(self._client.stop)
        self._publishing = asyncio.create_task(self._publish(metrics))
        self._leaving.callback(self._publishing.cancel)
        host, node = ray.util.get_node_ip_address(), node_here()
        server, address = await start_server(
            partial(add_servicer, self.role, self._client), host, self._trust
        )
        self._leaving.push_async_callback(server.stop, STOP_GRACE_S)
        self._leaving.push_async_callback(self.leave)  # runs first: gateways continue at other workers
        return {
            "role": self.role,
            "model": self._ready.settings.model,
            "address": address,
            "pid": os.getpid(),
            "ranks": tuple(place.pid for place in self.places),
            "gpus": gpus_given() or (),
            "places": tuple({**structs.asdict(place), "node": place.node or node} for place in self.places),
            "node": node,
            "vocab_size": self._ready.vocab_size,
            "max_length": self._ready.max_length,
            "slow_because": self._ready.slow_because,
            "promise": self._ready.promise.sentence,
            "is_exact": self._ready.promise.is_exact,
            "settings": self._ready.settings.model_dump(exclude={"model"}),
            "survey": self._ready.survey,
        }

    def reconfigure(self, user_config: Any) -> None:
        """Logs that a worker has no live settings.

        Without this method, Serve would end the worker at the first ``user_config``.
        """
        logger.error(
            "user_config=%r has no effect on a %s worker, only on the deployment gateway",
            user_config,
            self.role,
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the usage, which Serve polls if the deployment scales."""
        load = (await self._client.report()).load
        return {
            SEQUENCES: self._client.open_sequences,
            CACHE_IN_USE: 1 - load.free_blocks / load.total_blocks,
        }

    async def leave(self) -> None:
        """Ends open sequences, which continue without this worker."""
        self._client.leave()

    async def _publish(self, metrics: EngineMetrics) -> None:
        while True:
            metrics.publish(await self._client.report())
            await asyncio.sleep(PUBLISH_S)

    async def __del__(self) -> None:
        """Ends the worker. Serve awaits this before a replica ends, even if it could not be built."""
        await self._leaving.aclose()


def _leave_unless_drained(end: "asyncio.Future[EngineStoppedError]") -> None:
    if not isinstance(end.result(), LeavingError):
        leave(str(end.result()))


class DraftWorker(Worker):
    role = "draft"

    def __init__(
        self,
        settings: EngineSettings,
        trust: Trust,
        start_tracing: Callable[[], Callable[[], None]],
        name: str,
    ) -> None:
        """name: name of the draft."""
        super().__init__(settings, trust, start_tracing)
        self._name = name

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {**await super().record_replica_metadata(), "draft": self._name}


class TargetWorker(Worker):
    role = "target"

    def __init__(
        self,
        settings: EngineSettings,
        trust: Trust,
        start_tracing: Callable[[], Callable[[], None]],
        has_receipts: bool = False,
    ) -> None:
        """has_receipts: whether digests of the model's files are computed and published."""
        super().__init__(settings, trust, start_tracing)
        self._digests: dict[str, str] = {}
        if has_receipts:
            model = settings.model
            self._digests = {"weights": weights_digest(model), "tokenizer": tokenizer_digest(model)}

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {**await super().record_replica_metadata(), **self._digests}

    async def leave(self) -> None:
        """Waits while gateways move the open sequences to other targets."""
        await self._client.drain(DRAIN_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {**await super().record_autoscaling_stats(), FIRST_TOKEN: self._client.first_tokens.tail()}

    def start(self, settings: EngineSettings) -> tuple[EngineProcess, Ready]:
        if settings.tensor_parallel == 1:
            return super().start(with_threads(settings, 1))
        others = OtherRanks(settings)
        settings = with_threads(settings, others.beside_rank_0)
        engine = EngineProcess(settings, leave, gpus_given(), others.host)
        self._leaving.callback(engine.join)
        ready = engine.ready(others.meet)
        self.places = (engine.place, *others.places)
        return engine, ready
