"""A worker's side of gRPC: a bidirectional stream for each gateway."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError

from actors.engine_client import EngineClient, LeavingError
from actors.gateway_sequences import GatewaySequences
from actors.translation import DraftTranslation, TargetTranslation, Translation
from protos import rounds_pb2_grpc

Role = Literal["target", "draft"]

_SERVICES: dict[Role, tuple[type[Translation[Any, Any]], Any]] = {
    "target": (TargetTranslation, rounds_pb2_grpc.add_TargetWorkerServicer_to_server),
    "draft": (DraftTranslation, rounds_pb2_grpc.add_DraftWorkerServicer_to_server),
}


def add_servicer(role: Role, engine: EngineClient, server: grpc.aio.Server) -> None:
    """Makes the server answer as a worker of that role."""
    translation, add_to = _SERVICES[role]
    add_to(Servicer(translation(), engine), server)


class Servicer:
    """A stream carries the sequences of one gateway, which do not outlive it."""

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

        self._engine.end.add_done_callback(wake)
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
            reading.cancel()
            sequences.close()
