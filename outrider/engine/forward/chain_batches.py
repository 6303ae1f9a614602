"""Reused batches of a few consecutive tokens per sequence: plain decoding, and Drafts that are chains."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.forward.batch import Batch, paged_batch
from outrider.engine.inputs.block_tables import NOTHING_NEW, BlockTables
from outrider.engine.inputs.paged_input import END, FEW_TILE, FIRST, LANE, PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.learning.lru import Lru

_KEPT = 4  # batches; drafting alternates between the first step of a Draft and its other steps

Sizes = tuple[tuple[int, int], ...]  # tokens and rows of logits of each feed
Numbers = NDArray[np.int64]


class ChainBatches:
    """Lays out a batch once for given sizes, and overwrites its numbers in later steps with these sizes.

    A pass must be over before the next batch is requested, so this class is for CPUs.
    """

    def __init__(self, tables: BlockTables, dtype: torch.dtype) -> None:
        """dtype: type of queries."""
        self._tables, self._dtype = tables, dtype
        self._laid_out = Lru[Sizes, tuple[PagedInput[Numbers], Numbers, Batch]](_KEPT)

    def of(self, step: StepInput) -> Batch | None:
        """Returns the batch of the step; None if a feed is no chain, or longer than a tile of few rows."""
        feeds = step.feeds
        if any(feed.tree is not None or feed.looks_ahead or len(feed.tokens) > FEW_TILE for feed in feeds):
            return None
        sizes = tuple((len(feed.tokens), feed.num_logits) for feed in feeds)
        is_known = sizes in self._laid_out
        numbers, of_tiles, batch = self._laid_out.get(sizes, lambda: self._lay_out(step))
        if is_known:
            self._write(numbers, of_tiles, feeds)
        return batch

    def _lay_out(self, step: StepInput) -> tuple[PagedInput[Numbers], Numbers, Batch]:
        """Returns the arrays of a batch, the index of each tile's feed, and the batch."""
        # On a CPU new blocks are in the tables already: host and device share them.
        tables, step = self._tables, replace(step, new_blocks=NOTHING_NEW)
        buffer = fill(PagedLayout.of(step), step, tables)
        numbers = PagedInput.of(buffer.arrays, tables.on_host)
        given = PagedInput.of(buffer.sent(), tables.on_device)  # views of the buffer's memory
        ends = np.cumsum([len(feed.tokens) for feed in step.feeds])
        of_tiles = np.searchsorted(ends, numbers.few_tiles[:, FIRST], side="right")
        batch = paged_batch(given, given.logit_rows, tables.block_size, self._dtype)
        return numbers, of_tiles, batch

    def _write(self, numbers: PagedInput[Numbers], of_tiles: Numbers, feeds: Sequence[Feed]) -> None:
        size, slots = self._tables.block_size, list[int]()
        for feed in feeds:
            blocks = self._tables.on_host[feed.row]
            for place in range(feed.start, feed.start + len(feed.tokens)):
                slots.append(int(blocks[place // size]) * size + place % size)
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        places = [range(feed.start, end) for feed, end in zip(feeds, ends, strict=True)]
        numbers.token_ids[0] = [*chain.from_iterable(feed.tokens for feed in feeds)]
        numbers.position_ids[0] = [*chain.from_iterable(places)]
        numbers.slots[:] = slots
        numbers.seen[:] = numbers.position_ids[0] + 1
        numbers.lanes[:] = [feed.row for feed in feeds]
        numbers.few_tiles[:, LANE] = numbers.lanes[of_tiles]
        numbers.few_tiles[:, END] = np.array(ends)[of_tiles]
