"""gRPC server at a port of the gateway itself, without Serve's proxy."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc

from gateway.api.refusals_log import logger
from gateway.errors import DEFECT
from protos import generation_pb2_grpc

NO_MESSAGE = "request: its bytes are no message that this method takes"


def direct_server(servicer: Any, address: str, max_message_bytes: int) -> tuple[grpc.aio.Server, int]:
    """Returns a server that is not started, and its port, which all gateways of a machine share.

    The kernel distributes connections among the gateways (SO_REUSEPORT).

    Args:
        servicer: servicer of the Generation service, which also answers grpc.health.v1.
        address: host:port; port 0 means any free port.

    Raises:
        RuntimeError: another program has the port.
    """
    server = grpc.aio.server(
        interceptors=[_StatusInterceptor()],
        options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 1)],
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return server, server.add_insecure_port(address)


class _StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends failed calls with the status of their context: grpc.aio would send the exception's text."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None

        async def unary(data: bytes, context: Any) -> Any:
            async with _ending_with_status(context):
                reply = handler.unary_unary(handler.request_deserializer(data), context)
                return await reply if isawaitable(reply) else reply

        async def stream(data: bytes, context: Any) -> AsyncIterator[Any]:
            async with _ending_with_status(context):
                async for reply in handler.unary_stream(handler.request_deserializer(data), context):
                    yield reply

        method = {"unary_stream": stream} if handler.response_streaming else {"unary_unary": unary}
        return handler._replace(request_deserializer=None, **method)


@asynccontextmanager
async def _ending_with_status(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
    except NotImplementedError:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, context.details())
    except Exception:
        logger.exception("Request failed.")
        code = context.code()
        await context.abort(code or grpc.StatusCode.INTERNAL, context.details() if code else DEFECT)
