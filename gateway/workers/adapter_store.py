"""Adapters that requests have loaded, in the key-value store of Ray's head, which all gateways share.

So gateways need no messages among them, and a gateway that starts later has the adapters too.
"""

from collections.abc import Awaitable
from typing import Any, Protocol

from msgspec import json

from gateway.adapter import Adapter
from gateway.errors import WorkerLostError

NAMESPACE = b"outrider"
ANSWER_S = 1.0  # seconds; timeout after which Ray's head counts as lost


class AdapterStore(Protocol):
    """Adapters by name. Changes raise WorkerLostError if they were not stored."""

    async def all(self) -> dict[str, Adapter]:
        """Returns the adapters in the order of their names."""

    async def put(self, adapter: Adapter, *, replaces: bool) -> bool:
        """Stores an adapter; returns False if its name is taken and ``replaces`` is False."""

    async def delete(self, name: str) -> bool:
        """Removes an adapter; returns False if there was none."""


class RayAdapterStore:
    """Store in the Ray cluster of this process. While Ray's head is lost, it returns what it knew last."""

    def __init__(self, service: str) -> None:
        """service: text that sets the service apart from other services of the cluster."""
        self._prefix = f"{service}\n".encode()
        self._known: dict[str, Adapter] = {}

    async def all(self) -> dict[str, Adapter]:
        head, limit = _head(), ANSWER_S
        try:
            keys = await _answer(head.async_internal_kv_keys(self._prefix, NAMESPACE, timeout=limit))
            values = await _answer(head.async_internal_kv_multi_get(keys, NAMESPACE, timeout=limit))
        except WorkerLostError:
            return self._known
        self._known = {
            adapter.name: adapter
            for _, value in sorted(values.items())
            for adapter in [json.decode(value, type=Adapter)]
        }
        return self._known

    async def put(self, adapter: Adapter, *, replaces: bool) -> bool:
        key, value = self._prefix + adapter.name.encode(), json.encode(adapter)
        is_new = _head().async_internal_kv_put(key, value, replaces, NAMESPACE, timeout=ANSWER_S)
        return bool(await _answer(is_new)) or replaces

    async def delete(self, name: str) -> bool:
        key = self._prefix + name.encode()
        deleted = _head().async_internal_kv_del(key, False, NAMESPACE, timeout=ANSWER_S)
        return bool(await _answer(deleted))


def _head() -> Any:
    """Returns this process's client of Ray's head."""
    from ray.experimental.internal_kv import internal_kv_get_gcs_client  # takes a second; for replicas only

    return internal_kv_get_gcs_client()


async def _answer(answer: Awaitable[Any]) -> Any:
    """Returns the head's answer. Raises WorkerLostError if none comes."""
    from ray.exceptions import RayError

    try:
        return await answer
    except RayError as error:
        raise WorkerLostError(f"Ray's head does not answer: {error}") from error
