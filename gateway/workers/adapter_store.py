"""Adapters that requests have loaded, as all gateways find them: among the keys that Ray's head keeps.

Nothing is told from gateway to gateway, and a gateway that starts later knows them as well.
"""

from collections.abc import Awaitable
from typing import Any, Protocol

from msgspec import json

from gateway.adapter import Adapter
from gateway.errors import WorkerLostError

NAMESPACE = b"outrider"
ANSWER_S = 1.0  # seconds after which Ray's head is taken for lost


class AdapterStore(Protocol):
    """Adapters by name. Changes raise WorkerLostError unless they are kept."""

    async def all(self) -> dict[str, Adapter]:
        """Returns the adapters in the order of their names."""

    async def put(self, adapter: Adapter, *, replaces: bool) -> bool:
        """Keeps an adapter; returns False if its name is taken, which it must not replace."""

    async def delete(self, name: str) -> bool:
        """Forgets an adapter; returns False if there was none."""


class RayAdapterStore:
    """Store of the cluster that this process is in. It knows what it knew last while Ray's head is lost."""

    def __init__(self, service: str) -> None:
        """service: text that sets the service apart from others of the cluster."""
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
    """Returns the client of Ray's head that this process has."""
    from ray.experimental.internal_kv import internal_kv_get_gcs_client  # takes a second, for replicas only

    return internal_kv_get_gcs_client()


async def _answer(answer: Awaitable[Any]) -> Any:
    """Returns the head's answer. Raises WorkerLostError if none comes."""
    from ray.exceptions import RayError

    try:
        return await answer
    except RayError as error:
        raise WorkerLostError(f"Ray's head does not answer: {error}") from error
