"""Serves a large language model faster without changing a word it says.

``from outrider import Client`` is for those who ask a service. The client brings gRPC, which most of this
package does without, so it is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from outrider.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
