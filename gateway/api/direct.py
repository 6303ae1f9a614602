"""The gRPC API at a port of the gateway's own, past Serve's proxy."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from protos import generation_pb2_grpc

GRACE_S = 15.0  # for answers under way when the gateway is told to leave; Serve ends it after 20 s


def direct_server(servicer: Any, address: str, max_message_bytes: int) -> tuple[grpc.aio.Server, int]:
    """A server to be started, and its port. Gateways of one machine share it: the kernel deals them out.

    Args:
        servicer: of the Generation service, which answers grpc.health.v1's Check too.
        address: host:port; port 0 finds a free one.

    Raises:
        RuntimeError: another program has the port.
    """
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 1)]
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(_Health(servicer), server)
    return server, server.add_insecure_port(address)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Watch and List are UNIMPLEMENTED, as they are through Serve's proxy."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._servicer.Check(request, context)
