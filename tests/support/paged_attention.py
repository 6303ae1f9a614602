"""Reference attention over the paged cache, which also replaces kernels in tests."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.engine.inputs.block_tables import NOTHING_NEW, BlockTables
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed, StepInput

CPU = torch.device("cpu")


def paged_input(
    feeds: list[Feed], block_size: int, spare_slot: int = 0, layout: PagedLayout | None = None
) -> PagedInput[torch.Tensor]:
    """Returns the input of a batch on the CPU, in the smallest layout or in the given layout."""
    tables = tables_for(feeds, block_size, spare_slot)
    return laid_out(StepInput.of(tables, feeds), tables, layout)


def moved(paged: PagedInput[torch.Tensor], device: torch.device) -> PagedInput[torch.Tensor]:
    """Returns the input on a device. A GPU gets block tables of int32, as its kernels need."""
    paged = PagedInput(**{name: field.to(device) for name, field in vars(paged).items()})
    return replace(paged, block_tables=paged.block_tables.int()) if device.type == "cuda" else paged


def tables_for(
    feeds: list[Feed], block_size: int, spare_slot: int = 0, device: torch.device = CPU
) -> BlockTables:
    """Returns block tables with a row for each feed, and room for the blocks of the longest feed."""
    shape = max(len(feeds), 1), max((len(feed.blocks) for feed in feeds), default=1)
    return BlockTables(shape, block_size, spare_slot, device)


def laid_out(
    step: StepInput, tables: BlockTables, layout: PagedLayout | None = None
) -> PagedInput[torch.Tensor]:
    """Returns the input of a step whose blocks are in the tables. layout: None for the smallest layout."""
    step = replace(step, new_blocks=NOTHING_NEW)
    return PagedInput.of(fill(layout or PagedLayout.of(step), step, tables).sent(), tables.on_device)


@dataclass
class PlainAttention:
    """Computes the same as the kernels (outrider/engine/forward/kernel.py)."""

    block_size: int
    calls: int = 0
    is_asynchronous: bool = True

    def __call__(
        self,
        paged,
        query,
        keys,
        values,
        *,
        scaling=None,
        window=None,
        softcap=None,
        sinks=None,
        windowed=None,
    ):
        self.calls += 1
        heads, rows, dim = query.shape
        output = query.new_zeros(rows, heads, values.shape[2])
        for tile in torch.cat([paged.few_tiles, paged.many_tiles]).tolist():
            if tile[2]:
                own = slice(tile[1], tile[1] + tile[2])
                slots = self.slots(paged, tile, windowed)
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

    def take_in(self, paged):
        pass

    def slots(
        self, paged: PagedInput[torch.Tensor], tile: list[int], windowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the cache slots of the tile's sequence in order: int64 [end]."""
        lane, first, _, end, root = tile
        places = torch.arange(end)
        if paged.paths.shape[1] and root < end:
            places[root:] = root + paged.paths[first, : end - root]
        blocks = paged.block_tables[lane, places // self.block_size].long()
        blocks = blocks if windowed is None else windowed[blocks].long()
        return blocks * self.block_size + places % self.block_size


def visible_slots(paged: PagedInput[torch.Tensor], tile: list[int], window: int | None) -> torch.Tensor:
    """Returns which slots each row of a tile attends to: bool [rows of the tile, end]."""
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
