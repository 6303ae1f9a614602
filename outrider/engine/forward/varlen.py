"""Attention through torch's paged variable-length kernel, where it fits: CUDA, half precision, no trees."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.forward.attention_groups import QuerySpan

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]  # with the signature of torch.nn.attention.varlen.varlen_attn

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
ONE_SPLIT = 1  # a row's result does not depend on its batch, at some cost where queries are few
TOLERANCE = 2e-2  # of the kernel's own rounding in half precision


@dataclass(frozen=True)
class Ragged:
    """A batch as the kernel takes it; all tensors int32."""

    query_starts: torch.Tensor  # [num_lanes + 1] rows of the batch
    lengths: torch.Tensor  # [num_lanes] slots that the last query of each span sees
    block_table: torch.Tensor  # [num_lanes, blocks of the longest span]
    most_queries: int
    longest: int


def ragged(spans: Sequence[QuerySpan], block_size: int, device: torch.device) -> Ragged | None:
    """None where a tree branches: the kernel knows no mask but the causal one."""
    if any(span.tree is not None for span in spans):
        return None
    longest = max(span.length for span in spans)
    table = np.zeros((len(spans), -(-longest // block_size)), np.int32)
    for row, span in zip(table, spans, strict=True):
        count = -(-span.length // block_size)
        row[:count] = span.blocks[:count]
    starts = np.cumsum([0, *(span.count for span in spans)], dtype=np.int32)
    lengths = np.array([span.length for span in spans], np.int32)
    return Ragged(
        torch.from_numpy(starts).to(device),
        torch.from_numpy(lengths).to(device),
        torch.from_numpy(table).to(device),
        max(span.count for span in spans),
        longest,
    )


def attend_ragged(
    kernel: Kernel,
    batch: Ragged,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_size: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """query [heads, num_tokens, dim], keys and values [slots, kv_heads, dim] -> [num_tokens, heads, dim]"""
    output: torch.Tensor = kernel(
        query.transpose(0, 1),
        keys.view(-1, block_size, *keys.shape[1:]),
        values.view(-1, block_size, *values.shape[1:]),
        batch.query_starts,
        None,
        batch.most_queries,
        batch.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[0] != keys.shape[1],
        seqused_k=batch.lengths,
        block_table=batch.block_table,
        num_splits=ONE_SPLIT,
    )
    return output


def find_kernel(
    shapes: Mapping[int, LayerShape], block_size: int, dtype: torch.dtype, device: torch.device
) -> Kernel | None:
    """The kernel, if this build and device have it for such a cache; it is tried, not presumed."""
    if device.type != "cuda" or dtype not in KERNEL_DTYPES:
        return None
    if any(key_dim != value_dim for _, key_dim, value_dim in shapes.values()):
        logger.info("keys and values differ in size: attention gathers its blocks")
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    try:
        agrees = all(_agrees(varlen_attn, shape, block_size, dtype, device) for shape in {*shapes.values()})
    except RuntimeError as error:
        logger.warning(
            "no paged attention with block_size=%d here, blocks are gathered: %s", block_size, error
        )
        return None
    if not agrees:
        logger.warning("paged attention is wrong on this device, blocks are gathered instead")
    return varlen_attn if agrees else None


def _agrees(
    kernel: Kernel, shape: LayerShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether two queries over three blocks in disorder get what plain arithmetic gives."""
    heads, dim, _ = shape
    generator = torch.Generator(device).manual_seed(0)
    length = 2 * block_size + 1

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device, generator=generator)

    query, keys, values = (
        random(heads, 2, dim),
        random(4 * block_size, heads, dim),
        random(4 * block_size, heads, dim),
    )
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32, device=device)
    numbers = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 2], [length])]
    output = attend_ragged(
        kernel, Ragged(numbers[0], numbers[1], table, 2, length), query, keys, values, block_size, None, None
    )
    order = torch.cat([torch.arange(block_size, device=device) + block * block_size for block in (3, 0, 2)])
    seen = order[:length]
    scores = query.float() @ keys[seen].float().permute(1, 2, 0) * dim**-0.5
    scores[:, 0, -1] = -torch.inf
    expected = (scores.softmax(-1) @ values[seen].float().transpose(0, 1)).transpose(0, 1)
    return torch.allclose(output.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)
