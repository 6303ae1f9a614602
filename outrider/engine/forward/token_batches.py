"""Batches of one token per sequence: what plain decoding feeds, and all of a Draft but its first step."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.forward.batch import Batch, paged_batch
from outrider.engine.inputs.paged_input import END, PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed

_CPU = torch.device("cpu")


class TokenBatches:
    """Lays such a batch out once, and writes the numbers of the next step into it while its sizes stay.

    A pass must be over before the next batch is asked for, so this is for a CPU.
    """

    def __init__(self, block_size: int, dtype: torch.dtype) -> None:
        """dtype: type of queries."""
        self._block_size, self._dtype = block_size, dtype
        self._sizes = (0, 0)  # sequences, blocks of the longest
        self._numbers: PagedInput[NDArray[np.int64]]
        self._batch: Batch

    def of(self, feeds: Sequence[Feed]) -> Batch | None:
        """Returns the batch of these feeds; None: they are not of one token and one row of logits each."""
        if not all(len(feed.tokens) == feed.num_logits == 1 and feed.tree is None for feed in feeds):
            return None
        sizes = len(feeds), max(feed.start for feed in feeds) // self._block_size + 1
        if sizes != self._sizes:
            self._lay_out(feeds)
            self._sizes = sizes
        else:
            self._write(feeds)
        return self._batch

    def _lay_out(self, feeds: Sequence[Feed]) -> None:
        layout = PagedLayout.of(feeds, self._block_size)
        buffer = fill(layout, feeds, self._block_size, spare_slot=0, device=_CPU)  # there is no padding
        self._numbers = PagedInput.of(buffer.arrays)
        fields = buffer.sent()  # views of the buffer's memory
        self._batch = paged_batch(fields, fields["logit_rows"], self._block_size, self._dtype)

    def _write(self, feeds: Sequence[Feed]) -> None:
        numbers, size = self._numbers, self._block_size
        width = numbers.block_table.shape[1]
        for row, feed in zip(numbers.block_table, feeds, strict=True):
            held = feed.blocks[:width]
            row[: len(held)] = held
        numbers.token_ids[0] = [feed.tokens[0] for feed in feeds]
        numbers.position_ids[0] = [feed.start for feed in feeds]
        numbers.slots[:] = [int(feed.blocks[feed.start // size]) * size + feed.start % size for feed in feeds]
        ends = [feed.start + 1 for feed in feeds]
        numbers.seen[:] = numbers.ends[:] = numbers.few_tiles[:, END] = ends
        numbers.work[0, 1] = max(ends)
