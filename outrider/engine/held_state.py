"""Data of one sequence in the recurrent layers: two states, and records of its newest tokens.

A state covers some number of leading committed tokens. A record is what one token adds to a state. Records
are stored in a ring buffer by token position, as keys and values are stored in slots. A pass starts from the
newest usable state and replays the records of the tokens after it. It then stores the state after the last
token that is known to be committed. A rejected Draft therefore leaves no trace. A pass can also be repeated:
it overwrites the state from which the repetition would not start.

Between these two states a pass computes the state after each committed token once. Some of them are states at
block ends that the cache wants to keep for other sequences (outrider/engine/cache/kept_states.py). The pass
stores these as well, with or without a Draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

RECORDS = 64  # capacity of the ring: nodes of a Draft, and tokens since the older state
MOST_NODES = 32  # nodes of a verified Draft; the other half of the ring is for committed tokens


@dataclass(frozen=True)
class StateUse:
    """States that a pass reads and writes."""

    slot: int  # slot of the sequence in RecurrentStates
    first: int  # number of tokens that the initial state covers
    read: int | None  # index of the initial state, 0 or 1; None: the pass starts from zeros
    written: int  # number of tokens that the stored state covers
    write: int | None  # index of the stored state, 0 or 1; None: no state is stored
    ends: Mapping[int, int]  # places in KeptStates by the number of tokens that each state covers


@dataclass(eq=False)
class HeldState:
    """Slot of a sequence in RecurrentStates, and what is stored there."""

    slot: int | None = None  # None: the sequence holds no cache
    lengths: list[int] = field(default_factory=lambda: [0, 0])  # tokens that each state covers; 0: zeros
    base: int = 0  # position of the first record; tokens before it were adopted from another sequence
    end: int = 0  # position after the last record
    # Reserved places in KeptStates by the number of tokens to be covered, and those already written.
    ends: dict[int, int] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    newest: bytes | None = None  # digest of the newest kept state within the answer
    branch: int = 0  # number of leading tokens whose blocks other sequences have published

    def resumes_at(self, start: int) -> bool:
        """Whether a pass can feed tokens from position ``start`` on."""
        return any(self._suits(length, start) for length in self.lengths)

    def resume(self, length: int) -> None:
        """Restarts from state 0, which the caller has written and which covers ``length`` tokens."""
        self.lengths, self.base, self.end = [length, 0], length, length

    def forget_after(self, length: int) -> None:
        """Forgets states that cover more than ``length`` tokens."""
        self.lengths = [own if own <= length else 0 for own in self.lengths]

    def begin(self, start: int, count: int, committed: int) -> StateUse:
        """Begins a pass, which ``finish`` ends.

        Args:
            start: position of the first fed token.
            count: number of fed tokens.
            committed: number of leading tokens known to be committed; they may include fed tokens.

        Raises:
            ValueError: no state is left that could be replayed up to ``start``.
        """
        assert self.slot is not None
        suiting = [index for index in (0, 1) if self._suits(self.lengths[index], start)]
        if not suiting:
            raise ValueError(f"no recurrent state is left before token {start}: there are {self.lengths}")
        read = max(suiting, key=self.lengths.__getitem__)
        first, written = self.lengths[read], min(committed, start + count)
        self.end = max(self.end, start + count)
        write = None
        if written > first:
            repeatable = [index for index in suiting if self._suits(self.lengths[index], start)]
            write = 1 - min(repeatable or [read], key=self.lengths.__getitem__)
            self.lengths[write] = 0
        ends = {length: kept for length, kept in self.ends.items() if first < length <= written}
        self.stored.difference_update(ends)
        return StateUse(self.slot, first, read if first else None, written, write, ends)

    def finish(self, use: StateUse) -> None:
        """Ends a pass, which has stored its states."""
        if use.write is not None:
            self.lengths[use.write] = use.written
        self.stored.update(use.ends)

    def _suits(self, length: int, start: int) -> bool:
        """Whether the state after ``length`` tokens can be replayed up to position ``start``."""
        return length == start or max(self.end - RECORDS, self.base) <= length < start
