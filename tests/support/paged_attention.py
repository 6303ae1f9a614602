"""Attention over the paged cache in plain arithmetic: what kernels must say, and what stands in for them."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed


def paged_input(
    feeds: list[Feed], block_size: int, spare_slot: int = 0, layout: PagedLayout | None = None
) -> PagedInput[torch.Tensor]:
    """Returns the input of a batch on the CPU, with no more room than it takes, or with a layout's."""
    layout = layout or PagedLayout.of(feeds, block_size)
    return PagedInput.of(fill(layout, feeds, block_size, spare_slot, device=torch.device("cpu")).sent())


@dataclass
class PlainAttention:
    """Computes what the kernels do (outrider/engine/forward/kernel.py)."""

    block_size: int
    calls: int = 0
    is_asynchronous: bool = True

    def __call__(self, paged, query, keys, values, *, scaling=None, window=None, softcap=None, sinks=None):
        self.calls += 1
        heads, rows, dim = query.shape
        output = query.new_zeros(rows, heads, values.shape[2])
        for tile in torch.cat([paged.few_tiles, paged.many_tiles]).tolist():
            if tile[2]:
                own = slice(tile[1], tile[1] + tile[2])
                slots = self.slots(paged, tile)
                visible = visible_slots(paged, tile, window)
                repeats = heads // keys.shape[1]
                own_keys = keys[slots].repeat_interleave(repeats, 1).float()
                own_values = values[slots].repeat_interleave(repeats, 1).float()
                scores = torch.einsum("hqd,khd->hqk", query[:, own].float(), own_keys)
                scores *= dim**-0.5 if scaling is None else scaling
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                scores.masked_fill_(~visible, -math.inf)
                if sinks is not None:
                    column = sinks.float().view(-1, 1, 1).expand(-1, tile[2], 1)
                    scores = torch.cat([scores, column], -1)
                probs = scores.softmax(-1)[..., : len(slots)]
                output[own] = torch.einsum("hqk,khd->qhd", probs, own_values).to(output.dtype)
        return output

    def slots(self, paged: PagedInput[torch.Tensor], tile: list[int]) -> torch.Tensor:
        """int64 [end] of the tile's sequence, in order."""
        lane, first, _, end, root = tile
        places = torch.arange(end)
        if paged.paths.shape[1] and root < end:
            places[root:] = root + paged.paths[first, : end - root]
        return paged.block_table[lane, places // self.block_size] * self.block_size + places % self.block_size


def visible_slots(paged: PagedInput[torch.Tensor], tile: list[int], window: int | None) -> torch.Tensor:
    """bool [rows of the tile, end]"""
    _, first, count, end, root = tile
    own = slice(first, first + count)
    slots = torch.arange(end)
    visible = slots < paged.seen[own, None]
    if window is not None:
        visible &= slots > paged.position_ids[0, own, None] - window
    if root < end and not paged.paths.shape[1]:
        bits = np.unpackbits(paged.ancestors[own].numpy().view(np.uint8), axis=1, bitorder="little")
        visible[:, root:] |= torch.from_numpy(bits[:, : end - root].astype(bool))
    return visible
