"""Serves a large language model faster without changing a word it says.

``from outrider import Client`` gives the client of a running service. It is imported on first use, because
it needs gRPC and most of this package does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client.async_client import AsyncClient
    from outrider.client.client import Client
    from outrider.client.errors import (
        AuthenticationError,
        BadRequestError,
        DeadlineExceededError,
        OutriderError,
        ServiceOverloadedError,
        ServiceUnavailableError,
    )

__all__ = [
    "AsyncClient",
    "AuthenticationError",
    "BadRequestError",
    "Client",
    "DeadlineExceededError",
    "OutriderError",
    "ServiceOverloadedError",
    "ServiceUnavailableError",
]
MODULES = {"Client": "client", "AsyncClient": "async_client"}  # the errors are in "errors"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"outrider.client.{MODULES.get(name, 'errors')}"), name)
