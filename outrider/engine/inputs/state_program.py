"""Recurrences of a pass as a program of numbers, which a GPU kernel follows in all recurrent layers.

The program lists for each sequence the tokens to compute, in order. A tree node may not be a child of the
token before it. The kernel then restarts from the state before the tree and computes the node's path again.
So the kernel holds only two states: the state before the tree (the root) and the current state.

A source of numbers is a fed row, or -1 - code. Codes count the rows of the rings, then the rows of the tails;
the next code stands for zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.engine.held_state import RECORDS
from outrider.engine.inputs.recurrence import Recurrence

STATES = 2  # states of a sequence
SEQUENCE_FIELDS = 4  # first operation, number of operations, state read, state written; -1: no state
ROW, KEEP, FLAGS, SOURCES = range(4)  # fields of an operation: row of output, kept state, flags, first source
BEGINS_AT_ROOT, IS_ROOT, IS_STORED = 1, 2, 4  # flags: starts at the root; state becomes the root, is stored
NONE = -1

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class StateProgram:
    """Program of a pass on the device; all tensors are int64."""

    sequences: Tensor  # [sequences, SEQUENCE_FIELDS]
    operations: Tensor  # [operations, SOURCES + taps]
    sources: Tensor  # [(written + kept) * tokens of a tail] sources of the tails of these states
    written: Tensor  # states that are written
    kept: Tensor  # kept states that are written
    ring: Tensor  # rows of the rings that are written
    ringed: Tensor  # fed rows that are written to ``ring``


class _Part:
    """Program of one sequence."""

    def __init__(self, recurrence: Recurrence, tail: int, slots: int) -> None:
        use = recurrence.use
        self._recurrence, self._tail = recurrence, tail
        self._parents, self._chain = recurrence.parents, recurrence.chain
        self._rings, self._zeros = slots * RECORDS, slots * (RECORDS + STATES * tail)
        self._begun = NONE if use.read is None else use.slot * STATES + use.read
        self.written = NONE if use.write is None else use.slot * STATES + use.write

    def operations(self) -> Numbers:
        """Returns [operations, SOURCES + taps]."""
        recurrence = self._recurrence
        order = [*self._order()]
        made = np.full((len(order), SOURCES + self._tail + 1), NONE, np.int64)
        steps = np.array([step for step, _ in order])
        emits = np.array([emits for _, emits in order]) & (steps >= recurrence.replayed)
        made[:, ROW] = np.where(emits, recurrence.rows.start + steps - recurrence.replayed, NONE)
        made[:, SOURCES:] = self.sources(steps)
        made[:, FLAGS] = 0
        before = np.concatenate([[-1], steps[:-1]])
        parents = np.asarray(self._parents, np.int64)[steps]
        made[parents != before, FLAGS] |= BEGINS_AT_ROOT
        if 0 < self._chain < len(self._parents):
            made[self._chain - 1, FLAGS] |= IS_ROOT
        for step, kept in recurrence.kept_after.items():
            made[step, KEEP] = kept
        if (stored := recurrence.stored_after) is not None:
            made[stored, FLAGS] |= IS_STORED
        return made

    def sequence(self, first: int, count: int) -> list[int]:
        return [first, count, self._begun, self.written]

    def tails(self) -> tuple[list[Numbers], list[Numbers]]:
        """Returns the sources of the written state's tail, and of the kept states' tails."""
        stored, kept = self._recurrence.stored_after, [*self._recurrence.kept_after]
        of_written = [] if stored is None else [self.sources(np.array([stored]))[0, 1:]]
        return of_written, [self.sources(np.array([step]))[0, 1:] for step in kept]

    def ring(self) -> tuple[Numbers, Numbers]:
        """Returns rows of the rings, and the newest fed rows, which are written to these rows."""
        recurrence, rows = self._recurrence, self._recurrence.rows
        count = min(rows.stop - rows.start, RECORDS)
        end = recurrence.use.first + recurrence.replayed + rows.stop - rows.start
        places = np.arange(end - count, end) % RECORDS
        return recurrence.use.slot * RECORDS + places, np.arange(rows.stop - count, rows.stop)

    def sources(self, steps: Numbers) -> Numbers:
        """Returns the sources of the convolution's inputs at steps: [steps, tokens of a tail + 1]."""
        parents, columns = np.asarray(self._parents, np.int64), [steps]
        for _ in range(self._tail):
            last = columns[-1]
            columns.append(np.where(last >= 0, parents[np.maximum(last, 0)], last - 1))
        seen = np.stack(columns[::-1], 1)
        use, replayed = self._recurrence.use, self._recurrence.replayed
        in_ring = -1 - (use.slot * RECORDS + (use.first + seen) % RECORDS)
        in_tail = np.full_like(seen, -1 - self._zeros)
        if self._begun != NONE:
            in_tail = -1 - (self._rings + (self._begun + 1) * self._tail + seen)
        fed = self._recurrence.rows.start + seen - replayed
        return np.where(seen < 0, in_tail, np.where(seen < replayed, in_ring, fed))

    def _order(self) -> Iterator[tuple[int, bool]]:
        """Yields the steps in the order in which they are computed, and whether their output is wanted."""
        chain, parents = self._chain, self._parents
        yield from ((step, True) for step in range(chain))
        last, children = chain - 1, dict[int, list[int]]()
        for step in range(chain, len(parents)):
            children.setdefault(parents[step], []).append(step)
        waiting = children.get(last, [])[::-1]
        while waiting:
            step = waiting.pop()
            if parents[step] != last:
                yield from ((above, False) for above in self._path_to(step))
            yield step, True
            last = step
            waiting += reversed(children.get(step, []))

    def _path_to(self, step: int) -> list[int]:
        """Returns the ancestors of a step within its tree, root first."""
        path, above = list[int](), self._parents[step]
        while above >= self._chain:
            path.append(above)
            above = self._parents[above]
        return path[::-1]


def state_program(
    recurrences: Sequence[Recurrence], tail: int, slots: int, device: torch.device
) -> StateProgram:
    """Returns the program of a pass.

    Args:
        tail: number of previous tokens that the convolution reads.
        slots: number of slots of recurrent states.
        device: a GPU.
    """
    parts = [_Part(recurrence, tail, slots) for recurrence in recurrences]
    operations = [part.operations() for part in parts]
    firsts = np.cumsum([0, *map(len, operations)])
    sequences = [
        part.sequence(int(first), len(own))
        for part, first, own in zip(parts, firsts, operations, strict=False)
    ]
    of_written, of_kept = zip(*(part.tails() for part in parts), strict=True)
    rings, ringed = zip(*(part.ring() for part in parts), strict=True)
    lists: list[Numbers] = [
        np.array(sequences, np.int64),
        np.concatenate(operations),
        np.concatenate([np.zeros(0, np.int64), *(row for rows in (*of_written, *of_kept) for row in rows)]),
        np.array([part.written for part in parts if part.written != NONE], np.int64),
        np.array([kept for each in recurrences for kept in each.kept_after.values()], np.int64),
        np.concatenate(rings),
        np.concatenate(ringed),
    ]
    sent = to_device(torch.from_numpy(np.concatenate([numbers.ravel() for numbers in lists])), device)
    split = sent.split_with_sizes([numbers.size for numbers in lists])
    return StateProgram(*(part.view(numbers.shape) for part, numbers in zip(split, lists, strict=True)))
