"""What the recurrent layers keep of a sequence: two states, and records of its newest tokens.

A state has seen some number of the sequence's committed tokens. A record is what a token adds to a state.
Records lie at the places of their tokens in a ring, as keys and values lie in slots. A pass begins with the
newest state that suits, replays the records of the tokens since, and stores the state after the tokens that
are known to be committed. So a refused Draft leaves nothing behind, and a pass may be repeated: of two states
it writes over the state that the repetition would not begin with.

On its way from the first of these states to the second a pass sees the state after every committed token
once. So it also stores those at the ends of blocks that the cache has asked for, to be kept for other
sequences (outrider/engine/cache/kept_states.py), with Drafts and without.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

RECORDS = 64  # places of the ring: nodes of a Draft, and tokens since the older state
MOST_NODES = 32  # nodes of a verified Draft: as many again are left to tokens since the older state


@dataclass(frozen=True)
class StateUse:
    """States with which a pass begins and ends."""

    slot: int  # slot of the sequence among recurrent states
    first: int  # number of tokens that the state has seen with which the pass begins
    read: int | None  # which of the two states that is; None: zeros
    written: int  # number of tokens that the stored state has seen
    write: int | None  # which of the two states is stored; None: neither
    ends: Mapping[int, int]  # memory of kept states by number of tokens that each has seen


@dataclass(eq=False)
class HeldState:
    """Slot of a sequence among recurrent states, and what lies there."""

    slot: int | None = None  # None: it holds no cache
    lengths: list[int] = field(default_factory=lambda: [0, 0])  # tokens that each state has seen; 0: zeros
    base: int = 0  # place from which on records were written: tokens before it were adopted
    end: int = 0  # places up to which records were written
    # Memory of states to be kept, by number of tokens that each will have seen; which of them are stored.
    ends: dict[int, int] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    newest: bytes | None = None  # digest of the kept state of its answer
    branch: int = 0  # number of its leading tokens that another sequence has computed as well

    def resumes_at(self, start: int) -> bool:
        """Whether a pass may feed tokens from place ``start`` on."""
        return any(self._suits(length, start) for length in self.lengths)

    def resume(self, length: int) -> None:
        """Goes on from the first state, which was written by the caller and has seen ``length`` tokens."""
        self.lengths, self.base, self.end = [length, 0], length, length

    def forget_after(self, length: int) -> None:
        """Forgets states that have seen more than ``length`` tokens."""
        self.lengths = [own if own <= length else 0 for own in self.lengths]

    def begin(self, start: int, count: int, committed: int) -> StateUse:
        """Begins a pass, which ``finish`` ends.

        Args:
            start: place of the first token that it feeds.
            count: number of tokens.
            committed: number of leading tokens that are known to be committed, these included.

        Raises:
            ValueError: no state is left from which the tokens before them could be replayed.
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
        """Ends a pass: its states are stored."""
        if use.write is not None:
            self.lengths[use.write] = use.written
        self.stored.update(use.ends)

    def _suits(self, length: int, start: int) -> bool:
        """Whether the state after ``length`` tokens leads to place ``start``."""
        return length == start or max(self.end - RECORDS, self.base) <= length < start
