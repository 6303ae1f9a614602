"""Memory of recurrent states: each sequence that holds blocks of the paged cache also holds a slot here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.decoding.choice_context import to_device
from outrider.engine.cache.kept_states import KEPT, KeptStates
from outrider.engine.cache.memory import zeros
from outrider.engine.held_state import MOST_NODES, RECORDS, HeldState
from outrider.engine.inputs.recurrence import Recurrence
from outrider.engine.inputs.state_program import StateProgram, state_program
from outrider.engine.inputs.step_input import NO_PAIRS, Changes, Move, Numbers

STATES = 2  # states of a sequence
ALIVE = 4  # states that exist while a token is computed, besides those of a tree's nodes


@dataclass(frozen=True)
class StateShape:
    """Shape of a layer's state, and sizes of what a token adds to it."""

    state: tuple[int, int, int, int]  # groups of heads, heads of each, and the matrix of a head
    tail: tuple[int, int]  # previous tokens that the convolution reads, and numbers of each
    record: int  # numbers of a record

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, without its tail."""
        return math.prod(self.state) * torch.float32.itemsize

    def share(self, ranks: int) -> "StateShape":
        """Returns the shape at each rank. ranks: number of ranks, which must divide the groups of heads."""
        groups, repeats, rows, columns = self.state
        state = (groups // ranks, repeats, rows, columns)
        return StateShape(state, (self.tail[0], self.tail[1] // ranks), self.record // ranks)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a slot in this layer, including its kept states. dtype: type of the model."""
        states = STATES + KEPT
        beside = states * math.prod(self.tail) + RECORDS * self.record
        return states * self.state_bytes + beside * dtype.itemsize


def states_bytes(shapes: Mapping[int, StateShape], dtype: torch.dtype, slots: int) -> int:
    """Returns the bytes of all slots. dtype: type of the model."""
    return slots * sum(shape.slot_bytes(dtype) for shape in shapes.values())


def tree_bytes(shapes: Mapping[int, StateShape]) -> int:
    """Returns the bytes of the states of a tree's nodes, which exist in one layer at a time."""
    return (MOST_NODES + ALIVE) * max((shape.state_bytes for shape in shapes.values()), default=0)


@dataclass(frozen=True)
class LayerStates:
    """Storage of a single recurrent layer: its part of RecurrentStates."""

    states: torch.Tensor  # float32 [slots, STATES, *StateShape.state]
    tails: torch.Tensor  # [slots, STATES, *StateShape.tail]
    records: torch.Tensor  # [slots, RECORDS, StateShape.record]
    kept_states: torch.Tensor  # float32 [places, *StateShape.state]
    kept_tails: torch.Tensor  # [places, *StateShape.tail]


class RecurrentStates:
    """Storage of recurrent layers, all of one shape, and its slots."""

    def __init__(
        self, shapes: Mapping[int, StateShape], slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            shapes: shapes by layer, which are all equal.
            slots: number of sequences.
            dtype: type of records; states are float32.
        """
        (shape,) = set(shapes.values())
        self._states = zeros((len(shapes), slots, STATES, *shape.state), torch.float32, device)
        self._tails = zeros((len(shapes), slots, STATES, *shape.tail), dtype, device)
        self._records = zeros((len(shapes), slots * RECORDS, shape.record), dtype, device)
        rings = self._records.view(len(shapes), slots, RECORDS, shape.record)
        self.kept = KeptStates(len(shapes), shape.state, shape.tail, KEPT * slots, dtype, device)
        kept = self.kept.all_states, self.kept.all_tails
        parts = zip(self._states, self._tails, rings, *kept, strict=True)
        self.layers = {layer: LayerStates(*part) for layer, part in zip(shapes, parts, strict=True)}
        self._free = [*reversed(range(slots))]
        self._moves: list[Move] = []  # pending moves of records
        self._resumed: list[tuple[int, int]] = []  # kept states, and the slots to which they will be copied

    def program_of(self, recurrences: Sequence[Recurrence]) -> StateProgram:
        """Returns the program of a pass on a GPU."""
        _, slots, _, tail, _ = self._tails.shape
        return state_program(recurrences, tail, slots, self._tails.device)

    def hold(self, held: HeldState) -> bool:
        """Gives a sequence a slot, if it holds none. Returns False if none is free."""
        if held.slot is None:
            if not self._free:
                return False
            held.slot = self._free.pop()
        return True

    def release(self, held: HeldState) -> None:
        """Frees the slot, and the places of states that are not published."""
        self.forget_after(held, 0)
        if held.slot is not None:
            self._free.append(held.slot)
            held.slot, held.base, held.end, held.newest = None, 0, 0, None

    def resume(self, held: HeldState, digest: bytes, length: int) -> None:
        """Makes a sequence with a slot continue from the kept state with this digest."""
        assert held.slot is not None
        self._resumed.append((self.kept.use(digest), held.slot))
        self.forget_after(held, 0)
        held.resume(length)

    def forget_after(self, held: HeldState, length: int) -> None:
        """Forgets unpublished states of a sequence that cover more than ``length`` tokens."""
        held.forget_after(length)
        for end in [end for end in held.ends if end > length]:
            self.kept.give_back(held.ends.pop(end))
            held.stored.discard(end)

    def move(self, held: HeldState, source: Numbers, target: Numbers) -> None:
        """Queues moves of a sequence's records to other places, to be made before the next pass."""
        assert held.slot is not None
        first = held.slot * RECORDS
        self._moves.append(Move(first + source % RECORDS, first + target % RECORDS))

    def take_changes(self) -> tuple[list[Move], Numbers]:
        """Returns ``Changes.records`` and ``Changes.resumed``, to be made before the next pass."""
        moves, self._moves = self._moves, []
        resumed, self._resumed = self._resumed, []
        return moves, np.array(resumed, np.int64) if resumed else NO_PAIRS

    def make(self, changes: Changes) -> None:
        """Applies the changes of states and records in their order."""
        for kept, slot in changes.resumed.tolist():
            self._states[:, slot, 0] = self.kept.all_states[:, kept]
            self._tails[:, slot, 0] = self.kept.all_tails[:, kept]
        for move in changes.records:
            places = to_device(torch.from_numpy(np.stack([move.source, move.target])), self._records.device)
            self._records[:, places[1]] = self._records[:, places[0]]
