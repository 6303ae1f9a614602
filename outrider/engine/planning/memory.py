"""Memory of a device, and the number of cache blocks within a memory budget."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.decoding.draft import MAX_NODES
from outrider.engine.cache.key_values import LayerShape
from outrider.engine.cache.narrow import type_of_cache
from outrider.engine.cache.windowed_blocks import KEPT_WINDOWS, WindowedLayers
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.loading.weights import resolve_prefill_chunk
from outrider.engine.settings import EngineSettings

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMIT = _CGROUP / "memory.max"  # limit of a container; "max" if there is none


class Pools(NamedTuple):
    """Blocks of a cache, without spare blocks."""

    num_blocks: int
    num_windowed: int = 0  # blocks of the pool for windowed layers; 0: these layers have no pool of their own


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


def pools_of(
    num_blocks: int,
    settings: EngineSettings,
    shapes: Mapping[int, LayerShape],
    windowed: WindowedLayers | None,
    dtype: torch.dtype,
    context_length: int,
) -> Pools:
    """Returns the blocks into which the memory of ``num_blocks`` blocks in all layers is divided.

    The pool for windowed layers has room for two windows of each of ``max_sequences`` sequences: its own, and
    one to be shared. If that is more than half of ``num_blocks``, it gets this half: then sequences of two
    windows or more gain, and shorter sequences lose.

    windowed: windowed layers among ``shapes``; None: there are none.
    """
    if windowed is None:
        return Pools(num_blocks)
    size = settings.block_size
    part = block_bytes(settings, {layer: shapes[layer] for layer in windowed.layers}, dtype)
    whole = block_bytes(settings, shapes, dtype) - part
    wanted = settings.max_sequences * (1 + KEPT_WINDOWS) * windowed.blocks_of_sequence(size)
    least = windowed.least_blocks(size, resolve_prefill_chunk(settings))
    num_windowed = min(max(wanted, least), num_blocks // 2 if whole else num_blocks)
    if num_windowed < least:
        return Pools(num_blocks)
    if not whole:  # blocks outside the pool take no memory
        longest = -(-(context_length + MAX_NODES) // size)
        return Pools(max(num_blocks, settings.max_sequences * longest), num_windowed)
    return Pools((num_blocks * (whole + part) - num_windowed * part) // whole, num_windowed)


def pool_bytes(
    pools: Pools,
    settings: EngineSettings,
    shapes: Mapping[int, LayerShape],
    windowed: WindowedLayers | None,
    dtype: torch.dtype,
) -> int:
    """Returns the bytes of all blocks. Arguments as for ``pools_of``."""
    layers = frozenset() if windowed is None or not pools.num_windowed else windowed.layers
    part = block_bytes(settings, {layer: shapes[layer] for layer in layers}, dtype)
    whole = block_bytes(settings, shapes, dtype) - part
    return pools.num_blocks * whole + pools.num_windowed * part


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
