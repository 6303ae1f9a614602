"""Which attention over the paged cache a device has."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.forward.paged_input import PagedInput

logger = logging.getLogger(__name__)

WIDEST_HEAD = 256
PARTS = 32  # of the longest context at most
SHORTEST_PART = 256  # slots


class Kernel(Protocol):
    """Attention that reads the cache where it lies."""

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
    shapes: Mapping[int, LayerShape], block_size: int, context_length: int, device: torch.device
) -> Kernel | None:
    """None where blocks have to be gathered: slow on a GPU, so that the log says why."""
    if device.type != "cuda":
        return None
    widest = max(max(dims) for _, *dims in shapes.values())
    if widest > WIDEST_HEAD:
        logger.error(
            "attention gathers its blocks, which is slow: of %d dimensions a head, a kernel takes %d at most",
            widest,
            WIDEST_HEAD,
        )
        return None
    try:
        from outrider.engine.kernels.paged_attention import PagedAttention
    except ImportError as error:
        logger.error("attention gathers its blocks, which is slow: pip install triton (%s)", error)
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack some
    return PagedAttention(block_size, part_slots(context_length), properties.shared_memory_per_block_optin)


def part_slots(context_length: int) -> int:
    """Of the parts in which few queries read their context: a power of two."""
    return 1 << (max(context_length // PARTS, SHORTEST_PART) - 1).bit_length()
