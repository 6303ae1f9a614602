"""Buffer of the target's hidden states that a head has not processed yet."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.engine.choosing.draft_request import DraftedSequence
from outrider.engine.drafters.target_drafter import CommittedStates
from outrider.engine.inputs.paged_input import FEW_QUERIES

MOST_WAITING = FEW_QUERIES  # tokens per sequence: as many as a captured pass takes


@dataclass
class _Waiting:
    """Buffered states of a sequence, at the beginning of a room: MOST_WAITING rows of the buffer."""

    room: int
    start: int  # position of the first token
    end: int


class WaitingStates:
    """Buffer for states of up to ``sequences`` sequences; states of further sequences are not buffered."""

    def __init__(
        self,
        sequences: int,
        block_size: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            block_size: tokens of a block of the cache.
            shape: number of layers, and size of a state.
        """
        self._block_size = block_size
        self._states = torch.empty(sequences * MOST_WAITING, *shape, dtype=dtype, device=device)
        self._free_rooms = [*range(sequences)]
        self._waiting: dict[DraftedSequence, _Waiting] = {}

    def add(self, committed: Sequence[CommittedStates]) -> list[CommittedStates]:
        """Buffers a copy of the states that need not be processed yet.

        Returns:
            the states to process now, after the buffered states of their sequence. They are due because a
            Draft is wanted, a block is full, or the buffer has no room.
        """
        due: list[CommittedStates] = []
        kept: list[Tensor] = []
        places: list[int] = []
        for part in committed:
            waiting, end = self._before(part), part.start + len(part.hidden)
            if waiting is None:
                due.append(part)
            elif part.is_wanted or not self._can_wait(waiting.start, end):
                due.append(self._joined(waiting, part))
                self.forget(part.sequence)
            else:
                first = waiting.room * MOST_WAITING - waiting.start
                places += range(first + part.start, first + end)
                kept.append(part.hidden)
                waiting.end = end
        if kept:
            self._states.index_copy_(0, to_device(torch.tensor(places), self._states.device), torch.cat(kept))
        return due

    def count(self, part: CommittedStates) -> int:
        """Returns how many buffered states ``add`` would put before a part."""
        waiting = self._waiting.get(part.sequence)
        follows = waiting is not None and waiting.start <= part.start <= waiting.end
        return part.start - waiting.start if waiting is not None and follows else 0

    def forget(self, sequence: DraftedSequence) -> None:
        """Drops the buffered states of a sequence."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            self._free_rooms.append(waiting.room)

    def _before(self, part: CommittedStates) -> _Waiting | None:
        """Returns the buffered states before a part, in a room that takes the part too; None: no free room.

        States of positions that are computed again replace the buffered states.
        """
        waiting = self._waiting.get(part.sequence)
        if waiting is not None and waiting.start <= part.start <= waiting.end:
            return waiting
        self.forget(part.sequence)
        if not self._free_rooms:
            return None
        self._waiting[part.sequence] = new = _Waiting(self._free_rooms.pop(), part.start, part.start)
        return new

    def _can_wait(self, start: int, end: int) -> bool:
        """Whether states from ``start`` to ``end`` may stay buffered; states of a full block may not."""
        is_block_full = end // self._block_size > start // self._block_size
        return end - start < MOST_WAITING and not is_block_full

    def _joined(self, waiting: _Waiting, part: CommittedStates) -> CommittedStates:
        """Returns a part with the buffered states before it prepended."""
        count, first = part.start - waiting.start, waiting.room * MOST_WAITING
        if not count:
            return part
        before = self._states[first : first + count]
        return replace(part, start=waiting.start, hidden=torch.cat([before, part.hidden]))
