"""Table of the workers that exist. Serve's thread writes it, the event loop reads it."""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.workers.streams import WorkerInfo

_BY_DEPLOYMENT: dict[str, tuple[WorkerInfo, ...]] = {}


def put(deployment: str, metadata: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the workers of a deployment, given the metadata that its workers have published."""
    _BY_DEPLOYMENT[deployment] = tuple(WorkerInfo(**fields) for fields in metadata)


def workers() -> list[WorkerInfo]:
    return [worker for deployment in list(_BY_DEPLOYMENT.values()) for worker in deployment]
