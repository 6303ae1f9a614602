"""States of the target that wait until a head takes them in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.engine.choosing.draft_request import DraftedSequence
from outrider.engine.drafters.target_drafter import CommittedStates
from outrider.engine.inputs.paged_input import FEW_QUERIES

MOST_WAITING = FEW_QUERIES  # tokens of a sequence, the most that a captured pass takes


@dataclass
class _Waiting:
    """States of a sequence that wait, at the beginning of a room."""

    room: int
    start: int  # position of the first token
    end: int


class WaitingStates:
    """Memory for waiting states of ``sequences`` sequences; states of further sequences do not wait."""

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
            shape: layers, and size of a state.
        """
        self._block_size = block_size
        self._states = torch.empty(sequences * MOST_WAITING, *shape, dtype=dtype, device=device)
        self._free_rooms = [*range(sequences)]
        self._waiting: dict[DraftedSequence, _Waiting] = {}

    def add(self, committed: Sequence[CommittedStates]) -> list[CommittedStates]:
        """Keeps a copy of the states that can wait.

        Returns:
            the other states, each after the waiting states of its sequence. A Draft is wanted, a block is
            full, or no more states can wait.
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
        """Returns how many states would come before a part in front of which ``add`` puts what waits."""
        waiting = self._waiting.get(part.sequence)
        follows = waiting is not None and waiting.start <= part.start <= waiting.end
        return part.start - waiting.start if waiting is not None and follows else 0

    def forget(self, sequence: DraftedSequence) -> None:
        """Drops the states of a sequence."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            self._free_rooms.append(waiting.room)

    def _before(self, part: CommittedStates) -> _Waiting | None:
        """Returns what waits before a part, in a room that takes the part too; None: no room is free.

        Positions that are computed again replace the waiting positions.
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
        """Whether states from ``start`` to ``end`` may wait; states of a full block may not."""
        is_block_full = end // self._block_size > start // self._block_size
        return end - start < MOST_WAITING and not is_block_full

    def _joined(self, waiting: _Waiting, part: CommittedStates) -> CommittedStates:
        """Returns a part, with the states that wait before it in front."""
        count, first = part.start - waiting.start, waiting.room * MOST_WAITING
        if not count:
            return part
        before = self._states[first : first + count]
        return replace(part, start=waiting.start, hidden=torch.cat([before, part.hidden]))
