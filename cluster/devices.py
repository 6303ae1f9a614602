"""Memory of a deployment's devices."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from cluster.gpus import gpus_here
from cluster.groups import DEFAULT_DRAFT, WorkerSettings
from cluster.settings import Settings
from outrider.engine.planning.memory import device_memory

# Memory in GB by Ray's names of accelerators, from data sheets. A100 and V100 are missing: Ray uses each of
# these names for cards of two sizes. A plan for the smaller card would waste half of the larger card.
ACCELERATORS = {
    "T4": 16,
    "P100": 16,
    "A10G": 24,
    "L4": 24,
    "L40S": 48,
    "A100-40G": 40,
    "A100-80G": 80,
    "H100": 80,
    "H20": 96,
    "H200": 141,
    "B200": 180,
}
NOT_ASKED: Mapping[str, int] = MappingProxyType({})


def memories(
    settings: Settings,
    memory: int | None = None,
    draft_memory: int | None = None,
    *,
    here: bool = True,
    asked: Mapping[str, int] = NOT_ASKED,
) -> dict[str, int] | None:
    """Returns bytes of each device by group of settings; None if a device is not known.

    There is always an entry for a draft: if the settings name no draft, it has the target's device.

    Args:
        settings: settings with the GPUs of each worker.
        memory: bytes, given by the caller, of the target's devices; of all devices without ``draft_memory``.
        here: whether the devices are this machine's.
        asked: bytes of each GPU by group of settings, as nodes report them (cluster/gpus.py).
    """
    found = {"target": memory or asked.get("target") or _memory_of(settings.target, here)}
    drafts: Mapping[str, WorkerSettings] = settings.drafts or {DEFAULT_DRAFT: settings.target}
    for name, draft in drafts.items():
        told = asked.get(f"drafts.{name}" if settings.drafts else "target")
        found[f"drafts.{name}"] = draft_memory or memory or told or _memory_of(draft, here)
    known = {group: size for group, size in found.items() if size is not None}
    return known if known.keys() == found.keys() else None


def _memory_of(worker: WorkerSettings, here: bool) -> int | None:
    """Returns the bytes of each of a worker's devices."""
    if worker.gpus and worker.accelerator is not None:
        size = ACCELERATORS.get(worker.accelerator)
        return None if size is None else size * 10**9
    if not here:
        return None
    return min(gpus_here(), default=None) if worker.gpus else device_memory(torch.device("cpu"))
