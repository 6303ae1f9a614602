"""Batches of a few tokens per sequence, each after the other: plain decoding, and Drafts that are chains."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.forward.batch import Batch, paged_batch
from outrider.engine.inputs.paged_input import END, FEW_TILE, LANE, PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed
from outrider.learning.lru import Lru

_CPU = torch.device("cpu")
_KEPT = 4  # batches; a draft alternates between the first step of a Draft and the others

# Tokens and rows of logits of each feed, and the blocks of the longest.
Sizes = tuple[tuple[tuple[int, int], ...], int]


class ChainBatches:
    """Lays a batch of some sizes out once, and writes into it the numbers of later steps with these sizes.

    A pass must be over before the next batch is asked for, so this is for a CPU.
    """

    def __init__(self, block_size: int, dtype: torch.dtype) -> None:
        """dtype: type of queries."""
        self._block_size, self._dtype = block_size, dtype
        self._laid_out = Lru[Sizes, tuple[PagedInput[NDArray[np.int64]], Batch]](_KEPT)

    def of(self, feeds: Sequence[Feed]) -> Batch | None:
        """Returns the batch of these feeds; None: a feed is a tree, or longer than a tile of few rows."""
        if any(feed.tree is not None or len(feed.tokens) > FEW_TILE for feed in feeds):
            return None
        longest = max(feed.start + len(feed.tokens) for feed in feeds)
        counts = tuple((len(feed.tokens), feed.num_logits) for feed in feeds)
        sizes = counts, -(-longest // self._block_size)
        is_known = sizes in self._laid_out
        numbers, batch = self._laid_out.get(sizes, lambda: self._lay_out(feeds))
        if is_known:
            self._write(numbers, feeds)
        return batch

    def _lay_out(self, feeds: Sequence[Feed]) -> tuple[PagedInput[NDArray[np.int64]], Batch]:
        layout = PagedLayout.of(feeds, self._block_size)
        buffer = fill(layout, feeds, self._block_size, spare_slot=0, device=_CPU)  # there is no padding
        fields = buffer.sent()  # views of the buffer's memory
        batch = paged_batch(fields, fields["logit_rows"], self._block_size, self._dtype)
        return PagedInput.of(buffer.arrays), batch

    def _write(self, numbers: PagedInput[NDArray[np.int64]], feeds: Sequence[Feed]) -> None:
        size, width = self._block_size, numbers.block_table.shape[1]
        slots = list[int]()
        for row, feed in zip(numbers.block_table, feeds, strict=True):
            blocks = feed.blocks[:width]
            row[: len(blocks)] = blocks
            for place in range(feed.start, feed.start + len(feed.tokens)):
                slots.append(int(blocks[place // size]) * size + place % size)
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        places = [range(feed.start, end) for feed, end in zip(feeds, ends, strict=True)]
        numbers.token_ids[0] = [*chain.from_iterable(feed.tokens for feed in feeds)]
        numbers.position_ids[0] = [*chain.from_iterable(places)]
        numbers.slots[:] = slots
        numbers.seen[:] = numbers.position_ids[0] + 1
        numbers.few_tiles[:, END] = np.array(ends)[numbers.few_tiles[:, LANE]]
