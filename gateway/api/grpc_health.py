"""gRPC health service, ``grpc.health.v1``, of one gateway."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from gateway.errors import OverloadedError
from gateway.generation.generation import Generation
from gateway.settings import SPARE_REQUESTS

SERVICES = ("", "outrider.v1.Generation")  # names that may be asked about; empty: the whole server
LOOK_EVERY_S = 0.2  # seconds between two checks for a change
# Watches need no API key, so they must leave some of the spare requests to Check and /health.
MAX_WATCHES = SPARE_REQUESTS // 2
RETRY_AFTER_S = 1.0  # seconds after which a client may open a Watch again if there are too many
# A replica that Serve replaces waits for its calls to end, but does not know that it is being replaced. So a
# Watch ends after this time, and its client opens another Watch.
WATCH_S = 60.0


class HealthMethods:
    """Methods of the service, named as in its proto, for probes and load balancers, which have no API key."""

    generation: Generation
    _watches = 0

    async def Check(self, message: health_pb2.HealthCheckRequest, grpc_context: Any) -> Any:  # noqa: N802
        """Returns whether requests can be answered now."""
        return health_pb2.HealthCheckResponse(status=self._status())

    async def List(self, message: health_pb2.HealthListRequest, grpc_context: Any) -> Any:  # noqa: N802
        """Returns the status of each service."""
        status = health_pb2.HealthCheckResponse(status=self._status())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(SERVICES, status))

    async def Watch(  # noqa: N802
        self, message: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncIterator[Any]:
        """Yields the status now and after each change. Ends after WATCH_S, or when the gateway leaves.

        Raises:
            OverloadedError: MAX_WATCHES are open at this gateway.
        """
        if self._watches >= MAX_WATCHES:
            error = OverloadedError(f"{MAX_WATCHES} calls of Watch are open already", RETRY_AFTER_S)
            grpc_context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            grpc_context.set_details(str(error))
            raise error
        self._watches += 1
        try:
            loop, told = asyncio.get_running_loop(), None
            end = loop.time() + WATCH_S
            while True:
                is_last = self.generation.readiness.is_leaving or loop.time() >= end
                status = self._status() if message.service in SERVICES else "SERVICE_UNKNOWN"
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
                if is_last:
                    return
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._watches -= 1

    def _status(self) -> str:
        return "NOT_SERVING" if self.generation.readiness.missing() else "SERVING"
