"""Handlers of the gRPC API in Serve's proxy: they pass cancellations on and refuse malformed messages."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from gateway.api.direct import NO_MESSAGE
from gateway.api.proxy_http import bound_heads
from gateway.api.refusals_log import shorten_refusals
from protos.generation_pb2_grpc import add_GenerationServicer_to_server

Handler = Callable[[Any, Any], Awaitable[bytes]]
StreamHandler = Callable[[Any, Any], AsyncGenerator[bytes, None]]
MALFORMED = object()  # sentinel in place of a request whose bytes cannot be parsed


def add_generation_servicer(servicer: Any, server: Any) -> None:
    """Registers the service at Serve's own server, which routes every method to a gateway.

    Serve calls no other function of ours in the proxy, so the limit on HTTP heads is set here too. That is
    early enough: Serve's HTTP server chooses its protocol later.
    """
    bound_heads()
    shorten_refusals()
    _add(add_GenerationServicer_to_server, servicer, server)


def add_health_servicer(servicer: Any, server: Any) -> None:
    """Registers the health service of gRPC in the same way: its Watch is a stream too."""
    _add(add_HealthServicer_to_server, servicer, server)


def _add(add: Callable[[Any, Any], None], servicer: Any, server: Any) -> None:
    route = server.service_handler_factory

    def routed(service_method: str, streaming_type: Any) -> Any:
        handler = route(service_method=service_method, streaming_type=streaming_type)
        return cancellable(handler) if streaming_type.value == "unary_stream" else _refusing(handler)

    server.service_handler_factory = routed
    try:
        add(servicer, _LenientServer(server))
    finally:
        server.service_handler_factory = route


class _LenientServer:
    """Registers methods that get MALFORMED for unreadable bytes; gRPC would end the call with UNKNOWN."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            handler._method_handlers = _lenient(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(service, _lenient(methods))


def _lenient(methods: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: method._replace(request_deserializer=_read_or_malformed(method.request_deserializer))
        for name, method in methods.items()
    }


def _read_or_malformed(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_or_malformed(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return MALFORMED

    return read_or_malformed


def _refusing(handler: Handler) -> Handler:
    async def handle(request: Any, context: Any) -> bytes:
        await _refuse_malformed(request, context)
        return await handler(request, context)

    return handle


async def _refuse_malformed(request: Any, context: Any) -> None:
    if request is MALFORMED:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)


def cancellable(handler: StreamHandler) -> StreamHandler:
    """Returns a stream handler that passes on every cancellation, and refuses malformed messages.

    Serve's handler passes on a cancellation only while it waits for the next reply. A cancellation while a
    reply is being written to the client would be lost, and the answer would be generated to its end.
    """

    @wraps(handler)
    async def handle(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        await _refuse_malformed(request, context)
        replies = handler(request, LastingContext(context))
        try:
            async for reply in replies:
                yield reply
        except GeneratorExit:  # the call ended while a reply was written
            waiting = asyncio.ensure_future(anext(replies, None))
            await asyncio.sleep(0)  # lets the handler begin its wait
            waiting.cancel()
            await asyncio.wait({waiting})
            raise

    return handle


class LastingContext:
    """Context that knows the peer even after the call's end; gRPC's own context would crash the process."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()

    def peer(self) -> str:
        peer: str = self._peer
        return peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
