"""Block tables that stay on the device, so that a step copies only its new blocks there.

Rank 0 assigns rows to sequences and sends new blocks to the other ranks. So every rank has the table on its
device, and on its host, which computes slots from it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.decoding.draft import MAX_NODES
from outrider.engine.held_blocks import HeldBlocks

NOTHING_NEW = np.zeros((0, 2), np.int64)
SPARE_ROWS = 1  # rows in addition to a step's sequences, for a text on which a drafter is tried


def shape_of_tables(sequences: int, context_length: int, capacity: int, block_size: int) -> tuple[int, int]:
    """Returns rows and blocks of the block tables.

    Args:
        sequences: sequences of a step, at most.
        context_length: tokens of the longest sequence. A Draft may extend beyond it.
        capacity: slots of the cache.
    """
    return sequences + SPARE_ROWS, -(-min(context_length + MAX_NODES, capacity) // block_size)


class BlockTables:
    """Table with a row of blocks for each sequence, which keeps its row as long as there are enough rows."""

    def __init__(
        self, shape: tuple[int, int], block_size: int, spare_slot: int, device: torch.device
    ) -> None:
        """
        Args:
            shape: rows, and blocks of each.
            block_size: slots of a block.
            spare_slot: slot that belongs to no sequence, to which padding is written.
        """
        self.block_size, self.spare_slot, self.device = block_size, spare_slot, device
        self.on_host = np.zeros(shape, np.int64)
        # [rows, blocks] undefined after a sequence's own blocks
        self.on_device = torch.from_numpy(self.on_host)
        if device.type != "cpu":
            self.on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._holders = [HeldBlocks() for _ in range(shape[0])]
        self._fed = np.zeros(shape[0], np.int64)  # number of the newest update that used each row
        self._updates = 0

    def update(self, held: Sequence[HeldBlocks]) -> NDArray[np.int64]:
        """Gives a row to each sequence of a step.

        Returns:
            [num_new, 2] new entries: index into the flattened table, and block. A caller that fails to write
            them to the device must call ``forget``.

        Raises:
            ValueError: the step has more sequences than there are rows.
        """
        self._updates += 1
        for blocks in held:
            if blocks.row is not None and self._holders[blocks.row] is blocks:
                self._fed[blocks.row] = self._updates
        for blocks in held:
            if blocks.row is None or self._holders[blocks.row] is not blocks:
                self._give_row(blocks)
        most = self.on_host.shape[1]
        new = []
        for blocks in held:
            if blocks.known < blocks.count and blocks.known < (count := min(blocks.count, most)):
                assert blocks.row is not None
                places = np.arange(blocks.known, count)
                new.append(np.stack([blocks.row * most + places, blocks[places]], 1))
                blocks.known = count
        if not new:
            return NOTHING_NEW
        self.write(told := np.concatenate(new))
        return told

    def write(self, new: NDArray[np.int64]) -> None:
        """Writes new entries, which ``update`` returned here or at rank 0, into the table on the host."""
        self.on_host.reshape(-1)[new[:, 0]] = new[:, 1]

    def forget(self) -> None:
        """Makes later updates return whole rows, since the last entries may not have reached the device."""
        for blocks in self._holders:
            blocks.known = 0

    def held_at(self, row: int) -> HeldBlocks:
        """Returns a substitute for the blocks of a row's sequence, at ranks other than 0."""
        self._holders[row].row = row
        return self._holders[row]

    def _give_row(self, blocks: HeldBlocks) -> None:
        """Assigns a free row, or else the row of the sequence that was fed least recently."""
        idle = np.flatnonzero(self._fed < self._updates).tolist()
        if not idle:
            raise ValueError(f"a step has more sequences than the {len(self._holders)} rows of block tables")
        free = (row for row in idle if not self._holders[row])
        row = next(free, min(idle, key=self._fed.__getitem__))
        self._holders[row].row = None
        self._holders[row] = blocks
        blocks.row, blocks.known = row, 0
        self._fed[row] = self._updates
