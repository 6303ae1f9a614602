"""Choice of a device's kernel for attention over the paged cache."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.inputs.paged_input import PagedInput
from outrider.engine.kernels.cpu.attention import WIDEST_VECTOR, CpuAttention
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.settings import EngineSettings

WIDEST_HEAD = 256
PARTS = 32  # most parts of the longest context
SHORTEST_PART = 256  # slots
PROGRAMS = 2  # programs for each multiprocessor
GATHERS = "attention gathers its blocks, and no step has a CUDA graph: {}"


class Kernel(Protocol):
    """Attention that reads the cache in place."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host goes on meanwhile. Then steps have graphs, and are launched early."""

    def __call__(
        self,
        paged: PagedInput[torch.Tensor],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            query: [heads, rows, key_dim], the last dimension contiguous.
            keys, values: [slots, kv_heads, dim] of one layer, contiguous.
            scaling: of scores; None: one by the root of key_dim.
            window: positions that a query sees, its own included. Drafted ancestors are seen beyond it.
            softcap: bound of scores (Gemma 2).
            sinks: [heads] logits of a place that takes part in the softmax and holds nothing.

        Returns:
            [rows, heads, value_dim]
        """


def find_kernel(
    settings: EngineSettings, shapes: Mapping[int, LayerShape], context_length: int, device: torch.device
) -> tuple[Kernel | None, tuple[str, ...]]:
    """Returns the kernel, or None if blocks have to be gathered; and on a GPU why that is slow.

    settings: with the device's dtype resolved.
    """
    all_dims = [dim for _, *dims in shapes.values() for dim in dims]
    if device.type == "cpu" and settings.dtype == "float32" and compiled() is not None:
        fits = all(dim % WIDEST_VECTOR == 0 for dim in all_dims)
        return CpuAttention(settings.block_size) if fits else None, ()
    if device.type != "cuda":
        return None, ()
    widest = max(all_dims)
    if widest > WIDEST_HEAD:
        return None, (
            GATHERS.format(f"heads have {widest} dimensions, a kernel takes {WIDEST_HEAD} at most"),
        )
    try:
        from outrider.engine.kernels.paged_attention import PagedAttention
    except ImportError as error:
        return None, (
            GATHERS.format(f"Triton is missing, which chooses tokens too: pip install triton ({error})"),
        )
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack some
    return PagedAttention(
        settings.block_size,
        part_slots(context_length),
        properties.shared_memory_per_block_optin,
        programs=PROGRAMS * properties.multi_processor_count,
    ), ()


def part_slots(context_length: int) -> int:
    """Returns the number of parts in which few queries read their context: a power of two."""
    return 1 << (max(context_length // PARTS, SHORTEST_PART) - 1).bit_length()
