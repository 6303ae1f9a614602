"""Trust between gateways and workers: the deployment's token, and certificates if there are any."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from pydantic import BaseModel, ConfigDict, Field, model_validator

SHORTEST_TOKEN = 16  # characters
TOKEN = "outrider-token"  # key of a call's metadata
NAME = "outrider"  # name in workers' certificates: their addresses are not known beforehand


class Trust(BaseModel):
    """Secrets that gateways and workers of a deployment share. No log shows them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(min_length=SHORTEST_TOKEN, repr=False, description="presented with every stream")
    certificate: bytes | None = Field(
        default=None, repr=False, description="chain in PEM, for the name outrider"
    )
    key: bytes | None = Field(default=None, repr=False, description="its private key in PEM")
    authority: bytes | None = Field(
        default=None, repr=False, description="who signs the other side's, in PEM"
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> "Trust":
        if len({part is None for part in (self.certificate, self.key, self.authority)}) > 1:
            raise ValueError("certificate, key and authority belong together: give all three or none")
        return self

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that a gateway sends with every stream."""
        return ((TOKEN, self.token),)

    def connect(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.aio.Channel:
        """Returns a channel to a worker; with certificates each side proves its identity."""
        if self.certificate is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        return grpc.aio.secure_channel(
            address, credentials, options=(*options, ("grpc.ssl_target_name_override", NAME))
        )

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Makes a worker's server listen at an address; returns the port."""
        if self.certificate is None:
            return server.add_insecure_port(address)
        assert self.key is not None
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )
        return server.add_secure_port(address, credentials)

    def guard(self) -> "grpc.aio.ServerInterceptor[Any, Any]":
        """Returns an interceptor that refuses calls without the token."""
        return _Guard(self.token)


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        presented = dict(handler_call_details.invocation_metadata).get(TOKEN, "")
        if hmac.compare_digest(str(presented).encode(), self._token.encode()):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the deployment's token is missing or wrong")
