"""gRPC server of a worker: a bidirectional stream for each gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError

from actors.engine_client import EngineClient, EngineStoppedError, LeavingError
from actors.gateway_sequences import GatewaySequences, asked_adapter
from actors.messages import DropAdapter
from actors.translation import TRANSLATIONS, Translation
from outrider.engine.errors import UnsupportedModelError
from protos import rounds_pb2, rounds_pb2_grpc
from protos.trust import Trust

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    # Gateways ping once a second, even if nothing is sent; a silent gateway is dropped about as soon.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
)

Role = Literal["target", "draft"]


async def start_server(
    add_servicer: Callable[[grpc.aio.Server], None], host: str, trust: Trust
) -> tuple[grpc.aio.Server, str]:
    """Returns a server on a free port of ``host``, and its address. Only gateways may call it."""
    server = grpc.aio.server(interceptors=[trust.guard()], options=SERVER_OPTIONS)
    add_servicer(server)
    port = trust.listen(server, f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"


def add_servicer(role: Role, engine: EngineClient, server: grpc.aio.Server) -> None:
    """Makes the server answer as a worker of that role."""
    servicer, add_to = _SERVICES[role]
    add_to(servicer(TRANSLATIONS[role], engine), server)


class Servicer:
    """gRPC service of a worker. A stream carries one gateway's sequences, which do not outlive the stream."""

    def __init__(self, translation: Translation[Any, Any], engine: EngineClient) -> None:
        self._translation = translation
        self._engine = engine

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[Any], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        sequences = GatewaySequences(self._translation, self._engine)
        outbox = sequences.outbox
        reading = asyncio.create_task(sequences.read(requests))

        def wake(_: object) -> None:
            outbox.wake()

        def announce(_: object) -> None:
            outbox.append(rounds_pb2.Leaving())

        self._engine.end.add_done_callback(wake)
        self._engine.leaving.add_done_callback(announce)
        reading.add_done_callback(wake)
        try:
            while True:
                if has_ended := self._engine.end.done():
                    sequences.end_unopened(self._engine.end.result())
                is_last = reading.done() or has_ended
                messages = outbox.flush() if is_last else await outbox.woken()
                if messages:
                    await context.write(self._translation.replies(messages))
                elif is_last:
                    break
            if reading.done() and isinstance(reading.exception(), DecodeError):
                reason = "a message of the stream cannot be read"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
            if self._engine.end.done() and not isinstance(self._engine.end.result(), LeavingError):
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(self._engine.end.result()))
        finally:
            self._engine.end.remove_done_callback(wake)
            self._engine.leaving.remove_done_callback(announce)
            reading.cancel()
            sequences.close()


class TargetServicer(Servicer):
    """gRPC service of a target worker, with calls for adapters, which belong to no gateway's stream."""

    async def LoadAdapter(  # noqa: N802
        self, adapter: rounds_pb2.Adapter, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> rounds_pb2.Adapter:
        try:
            digest = await self._engine.load_adapter(asked_adapter(adapter))
        except UnsupportedModelError as refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        except EngineStoppedError as end:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(end))
        return rounds_pb2.Adapter(name=adapter.name, path=adapter.path, digest=digest)

    async def DropAdapter(  # noqa: N802
        self, adapter: rounds_pb2.Adapter, context: object
    ) -> rounds_pb2.AdapterDropped:
        self._engine.send(DropAdapter(adapter.digest))
        return rounds_pb2.AdapterDropped()


_SERVICES: dict[Role, tuple[type[Servicer], Any]] = {
    "target": (TargetServicer, rounds_pb2_grpc.add_TargetWorkerServicer_to_server),
    "draft": (Servicer, rounds_pb2_grpc.add_DraftWorkerServicer_to_server),
}
