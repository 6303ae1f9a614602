"""Memory of a device, and the number of cache blocks within a memory budget."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.engine.cache.narrow import type_of_cache
from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.settings import EngineSettings

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMIT = _CGROUP / "memory.max"  # limit of a container; "max" if there is none


def blocks_in(
    memory: int, settings: EngineSettings, shapes: Mapping[int, LayerShape], dtype: torch.dtype
) -> int:
    """Returns the number of blocks that fit into ``settings.cache_memory``, which is not None.

    memory: bytes of the device, of which ``settings.cache_memory`` may be a share.

    Raises:
        CacheTooSmallError: not one block fits.
    """
    budget = settings.cache_memory
    assert budget is not None
    if isinstance(budget, float):
        budget = int(budget * memory)
    block = block_bytes(settings, shapes, dtype)
    if budget < block:
        raise CacheTooSmallError(
            f"cache_memory={settings.cache_memory} gives {budget} bytes: one block takes {block}"
        )
    return budget // block


def block_bytes(settings: EngineSettings, shapes: Mapping[int, LayerShape], dtype: torch.dtype) -> int:
    """Returns the bytes of a block in all layers. dtype: type of the model."""
    numbers = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in shapes.values())
    return numbers * type_of_cache(settings, dtype).itemsize * settings.block_size


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of the device's memory; memory that only caches files counts as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _number_in(_MEMORY, "MemAvailable:") * 1024
    if not _CGROUP_LIMIT.exists() or (limit := _CGROUP_LIMIT.read_text().strip()) == "max":
        return available
    used = int((_CGROUP / "memory.current").read_text()) - _number_in(
        _CGROUP / "memory.stat", "inactive_file"
    )
    return min(available, int(limit) - used)


def empty_cache(device: torch.device) -> None:
    """Releases to the device the unused memory that torch's allocator holds."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _number_in(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))


def device_memory(device: torch.device) -> int:
    """Returns the bytes of the device's memory, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(installed, math.inf if limit == "max" else int(limit)))
