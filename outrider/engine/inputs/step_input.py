"""Input of a forward pass, and its serialized form, which rank 0 sends to the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from msgspec import Struct, structs
from numpy.typing import NDArray

from outrider.decoding.draft import Draft
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import HeldState, StateUse
from outrider.engine.inputs.block_tables import NOTHING_NEW, BlockTables

Numbers = NDArray[np.int64]
Rows = slice | torch.Tensor  # indices; a slice if they are consecutive
NO_TREE = Draft()
NO_SLOTS = np.zeros(0, np.int64)
NO_PAIRS = np.zeros((0, 2), np.int64)
NO_STATE = -1  # number that stands for None in a StateUse


class Feed(Struct, frozen=True, eq=False):
    """Tokens that a sequence feeds, and their place in the cache."""

    tokens: list[int]
    num_logits: int  # wanted rows of logits, for the last tokens
    start: int  # number of slots that are in use before the fed tokens
    blocks: HeldBlocks  # blocks of its slots, including the slots of the fed tokens
    tree: Draft | None  # pending and fed nodes, if they branch; None: each token sees all tokens before it
    adapter: int = 0  # number of its sequence's adapter; 0: none
    state: HeldState | None = None  # recurrent states of its sequence; None at ranks other than 0
    committed: int = 0  # leading slots whose tokens are committed, including fed tokens
    looks_ahead: bool = False  # whether each token also sees the tokens that are fed after it

    @property
    def row(self) -> int:
        """Row of its sequence in the block tables."""
        assert self.blocks.row is not None
        return self.blocks.row


@dataclass(frozen=True)
class Move:
    """Cache content that is copied before the pass."""

    source: Numbers  # slots
    target: Numbers  # slots, as many as in ``source``


@dataclass(frozen=True)
class ForeseenRounds:
    """Leading feeds of a step that follow Verdicts which only the device knows.

    The feeds are made as if nothing was accepted. The step's chosen tokens begin with the results of these
    Verdicts: see outrider/engine/inputs/told_tokens.py.
    """

    count: int = 0
    may_branch: bool = False  # whether nodes off a Draft's chain may be accepted, which move in the cache


NO_ROUNDS = ForeseenRounds()


@dataclass(frozen=True)
class WindowedChanges:
    """Changes of the pool for windowed layers before a pass, in the slots of that pool."""

    blocks: Numbers  # [num_blocks, 2] a block, and its block in the pool
    moves: list[Move]
    cleared: Numbers  # slots to fill with zeros


NO_WINDOWED_CHANGES = WindowedChanges(NO_PAIRS, [], NO_SLOTS)


@dataclass(frozen=True)
class Changes:
    """Changes of the cache before a pass: moves in order, then slots to clear, then changes of states."""

    moves: list[Move]
    cleared: Numbers  # slots to fill with zeros
    records: list[Move]  # moves of records of recurrent layers, in order
    # [num_resumed, 2] a kept state, and the slot of the sequence that starts from a copy of it, in order
    resumed: Numbers
    windowed: WindowedChanges = NO_WINDOWED_CHANGES


NO_CHANGES = Changes([], NO_SLOTS, [], NO_PAIRS)


@dataclass(frozen=True)
class StepInput:
    """Input of a step: changes of the cache, then a forward pass over all feeds."""

    changes: Changes
    feeds: list[Feed]
    new_blocks: Numbers  # [num_new, 2] result of BlockTables.update for the feeds
    uses: list[StateUse]  # use of each feed's recurrent states; empty without such layers
    rounds: ForeseenRounds = NO_ROUNDS

    def to_numbers(self) -> Numbers:
        """Serializes the input: lengths of lists, then the lists, with a list for each field of the feeds.

        A sequence's blocks are represented by its row in the block tables.
        """
        feeds, trees = self.feeds, [feed.tree or NO_TREE for feed in self.feeds]
        changes, uses = self.changes, self.uses
        windowed = changes.windowed
        lists: list[Sequence[object] | Numbers] = [changes.moves, changes.records, windowed.moves]
        lists += [changes.resumed, windowed.blocks, changes.cleared, windowed.cleared]
        lists += [self.new_blocks, feeds, uses]
        moves = [*changes.moves, *changes.records, *windowed.moves]
        parts: list[Sequence[int] | Numbers] = [
            [*map(len, lists)],
            [self.rounds.count, self.rounds.may_branch],
            [len(move.source) for move in moves],
            *[slots for move in moves for slots in (move.source, move.target)],
            changes.resumed.ravel(),
            windowed.blocks.ravel(),
            changes.cleared,
            windowed.cleared,
            self.new_blocks.ravel(),
            [feed.num_logits for feed in feeds],
            [feed.start for feed in feeds],
            [feed.row for feed in feeds],
            [feed.adapter for feed in feeds],
            [feed.looks_ahead for feed in feeds],
            [len(feed.tokens) for feed in feeds],
            [len(tree.tokens) for tree in trees],
            [*chain.from_iterable(feed.tokens for feed in feeds)],
            [*chain.from_iterable(tree.tokens for tree in trees)],
            [*chain.from_iterable(tree.parents for tree in trees)],
            *map(_numbers_of, uses),
        ]
        return np.concatenate([np.asarray(part, np.int64) for part in parts])

    @classmethod
    def of(
        cls,
        tables: BlockTables,
        feeds: Sequence[Feed],
        changes: Changes = NO_CHANGES,
        uses: Sequence[StateUse] = (),
        rounds: ForeseenRounds = NO_ROUNDS,
    ) -> "StepInput":
        """Returns the input with these feeds, whose sequences get rows of the block tables.

        Raises:
            ValueError: the feeds have more sequences than there are rows.
        """
        new_blocks = tables.update([feed.blocks for feed in feeds])
        return cls(changes, [*feeds], new_blocks, [*uses], rounds)

    @classmethod
    def from_numbers(cls, numbers: Numbers, tables: BlockTables) -> "StepInput":
        """Returns the input that ``to_numbers`` serialized, and writes its new blocks into the tables."""
        read = _Reader(numbers)
        num_moves, num_records, num_windowed, num_resumed, num_blocks = read.list(5)
        num_cleared, num_emptied, num_new, num_feeds, num_uses = read.list(5)
        num_rounds, may_branch = read.list(2)
        before = num_moves + num_records
        moves = [Move(read.array(count), read.array(count)) for count in read.list(before + num_windowed)]
        resumed, blocks = read.pairs(num_resumed), read.pairs(num_blocks)
        cleared, emptied = read.array(num_cleared), read.array(num_emptied)
        windowed = WindowedChanges(blocks, moves[before:], emptied)
        changes = Changes(moves[:num_moves], cleared, moves[num_moves:before], resumed, windowed)
        new_blocks = read.pairs(num_new)
        tables.write(new_blocks)
        num_logits, starts, rows = read.list(num_feeds), read.list(num_feeds), read.list(num_feeds)
        adapters, look_ahead = read.list(num_feeds), [*map(bool, read.list(num_feeds))]
        num_tokens, nodes = read.list(num_feeds), read.list(num_feeds)
        tokens, tree_tokens, parents = ([*map(read.list, counts)] for counts in (num_tokens, nodes, nodes))
        trees = [
            Draft(tuple(of_nodes), tuple(above)) if of_nodes else None
            for of_nodes, above in zip(tree_tokens, parents, strict=True)
        ]
        held = map(tables.held_at, rows)
        read_feeds = map(Feed, tokens, num_logits, starts, held, trees, adapters)
        feeds = [
            structs.replace(feed, looks_ahead=True) if looks_ahead else feed
            for feed, looks_ahead in zip(read_feeds, look_ahead, strict=True)
        ]
        uses = [_use_in(read) for _ in range(num_uses)]
        return cls(changes, feeds, new_blocks, uses, ForeseenRounds(num_rounds, bool(may_branch)))


NOTHING_FED = StepInput(NO_CHANGES, [], NOTHING_NEW, [])


def _numbers_of(use: StateUse) -> list[int]:
    """Serializes a StateUse, which ``_use_in`` reads."""
    read, write = (NO_STATE if state is None else state for state in (use.read, use.write))
    ends = chain.from_iterable(use.ends.items())
    return [use.slot, use.first, read, use.written, write, len(use.ends), *ends]


class _Reader:
    """Reader of an array of numbers, from its beginning."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._next = 0

    def array(self, count: int) -> Numbers:
        self._next += count
        return self._numbers[self._next - count : self._next]

    def list(self, count: int) -> list[int]:
        numbers: list[int] = self.array(count).tolist()
        return numbers

    def pairs(self, count: int) -> Numbers:
        return self.array(2 * count).reshape(-1, 2)


def _use_in(numbers: _Reader) -> StateUse:
    slot, first, read, written, write, num_ends = numbers.list(6)
    ends = dict(numbers.pairs(num_ends).tolist())
    states = (None if state == NO_STATE else state for state in (read, write))
    return StateUse(slot, first, next(states), written, next(states), ends)
