"""Blocks of the paged cache that a sequence holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_ROOM = 8  # blocks


@dataclass
class HeldWindow:
    """Range of a sequence's blocks that it also holds in layers with a sliding window."""

    first: int = 0  # place of the first such block
    end: int = 0  # place after the last such block


class HeldBlocks:
    """Blocks of a sequence in the order of its slots, and its row in the block tables.

    ``count`` is the number of blocks. outrider/engine/inputs/block_tables.py sets ``row``, which is None
    until the sequence is first fed, and ``known``, the number of leading blocks that the row contains.
    """

    def __init__(self, blocks: Sequence[int] | NDArray[np.int64] = ()) -> None:
        self._numbers = np.zeros(LEAST_ROOM, np.int64)  # block numbers, then spare capacity
        self.count = 0
        self.row: int | None = None
        self.known = 0
        self.push(blocks)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        blocks: list[int] = self[:].tolist()
        return iter(blocks)

    def __getitem__(self, places: Any) -> Any:
        """Returns block numbers, indexed like a numpy array."""
        return self._numbers[: self.count][places]

    def push(self, blocks: Sequence[int] | NDArray[np.int64]) -> None:
        """Appends blocks; the capacity grows by doubling."""
        end = self.count + len(blocks)
        if end > len(self._numbers):
            self._numbers = np.resize(self._numbers, max(end, 2 * len(self._numbers)))
        self._numbers[self.count : end] = blocks
        self.count = end

    def drop(self, keep: int) -> list[int]:
        """Removes all blocks after the first ``keep``, and returns the removed blocks."""
        dropped: list[int] = self._numbers[keep : self.count].tolist()
        self.count, self.known = min(self.count, keep), min(self.known, keep)
        return dropped
