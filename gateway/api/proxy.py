"""What Serve's gRPC proxy loads of ours: the public API, with cancellations that always arrive."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import wraps
from typing import Any

from gateway.api.proxy_http import bound_heads
from gateway.api.refusals_log import shorten_refusals
from protos.generation_pb2_grpc import add_GenerationServicer_to_server

StreamHandler = Callable[[Any, Any], AsyncGenerator[bytes, None]]


def add_generation_servicer(servicer: Any, server: Any) -> None:
    """Serve calls this with its own server, which routes every method to a gateway.

    No other code of ours runs in the proxy. So the bound on what it reads over HTTP is set here too: Serve
    calls this before its HTTP server chooses how to read.
    """
    bound_heads()
    shorten_refusals()
    route = server.service_handler_factory

    def routed(service_method: str, streaming_type: Any) -> Any:
        handler = route(service_method=service_method, streaming_type=streaming_type)
        return cancellable(handler) if streaming_type.value == "unary_stream" else handler

    server.service_handler_factory = routed
    try:
        add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    finally:
        server.service_handler_factory = route


def cancellable(handler: StreamHandler) -> StreamHandler:
    """The handler, so that it hears of every cancellation.

    Serve's handler tells the gateway of a cancellation only if that finds it waiting for the next reply. One
    that comes while a reply is written to the client is lost, and the answer is generated to its end.
    """

    @wraps(handler)
    async def handle(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        replies = handler(request, LastingContext(context))
        try:
            async for reply in replies:
                yield reply
        except GeneratorExit:  # the call ended while a reply was written
            waiting = asyncio.ensure_future(anext(replies, None))
            await asyncio.sleep(0)  # until it waits
            waiting.cancel()
            await asyncio.wait({waiting})
            raise

    return handle


class LastingContext:
    """A call's context that can be asked for the peer after its end, where grpc's own crashes the process."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()

    def peer(self) -> str:
        peer: str = self._peer
        return peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
