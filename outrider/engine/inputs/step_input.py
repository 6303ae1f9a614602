"""Input of a forward pass, and its form as numbers, which rank 0 sends to the ranks of its group."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from msgspec import Struct, structs
from numpy.typing import NDArray

from outrider.decoding.draft import Draft
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import HeldState
from outrider.engine.inputs.block_tables import NOTHING_NEW, BlockTables

Numbers = NDArray[np.int64]
Rows = slice | torch.Tensor  # indices; a slice if they are consecutive
NO_TREE = Draft()
NO_SLOTS = np.zeros(0, np.int64)


class Feed(Struct, frozen=True, eq=False):
    """Tokens that a sequence feeds, and their place in the cache."""

    tokens: list[int]
    num_logits: int  # wanted rows of logits, for the last tokens
    start: int  # number of slots written before
    blocks: HeldBlocks  # blocks of its slots, including the slots fed now
    tree: Draft | None  # pending and fed nodes, if they branch; None: each token sees all tokens before it
    adapter: int = 0  # number of its sequence's adapter; 0: none
    state: HeldState | None = None  # for recurrent layers, which run at a single rank
    committed: int = 0  # leading slots whose tokens are committed, those fed now included
    looks_ahead: bool = False  # whether each token also sees the tokens that are fed after it

    @property
    def row(self) -> int:
        """Row of the block tables that its sequence has in a step."""
        assert self.blocks.row is not None
        return self.blocks.row


@dataclass(frozen=True)
class Move:
    """Cache content that is copied before the pass."""

    source: Numbers  # slots
    target: Numbers  # slots, as many


@dataclass(frozen=True)
class ForeseenRounds:
    """Leading feeds of a step that follow Verdicts which the device alone knows, as if nothing was accepted.

    What these Verdicts tell leads the step's chosen tokens: see outrider/engine/inputs/told_tokens.py.
    """

    count: int = 0
    may_branch: bool = False  # whether a node off its Draft's chain may be accepted, whose cache has to move


NO_ROUNDS = ForeseenRounds()


@dataclass(frozen=True)
class StepInput:
    """Input of a step: moves in order, then slots to clear, then a forward pass over all feeds."""

    moves: list[Move]
    cleared: Numbers  # slots to fill with zeros
    feeds: list[Feed]
    new_blocks: Numbers  # [num_new, 2] what BlockTables.update returned for the feeds
    rounds: ForeseenRounds = NO_ROUNDS

    def to_numbers(self) -> Numbers:
        """Returns the lengths of lists, then the lists, with a column for each part of the feeds.

        The row of each sequence stands for its blocks.
        """
        feeds, trees = self.feeds, [feed.tree or NO_TREE for feed in self.feeds]
        parts: list[Sequence[int] | Numbers] = [
            [len(self.moves), len(self.cleared), len(self.new_blocks), len(feeds)],
            [self.rounds.count, self.rounds.may_branch],
            [len(move.source) for move in self.moves],
            *[slots for move in self.moves for slots in (move.source, move.target)],
            self.cleared,
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
        ]
        return np.concatenate([np.asarray(part, np.int64) for part in parts])

    @classmethod
    def of(
        cls,
        tables: BlockTables,
        feeds: Sequence[Feed],
        moves: Sequence[Move] = (),
        cleared: Numbers = NO_SLOTS,
        rounds: ForeseenRounds = NO_ROUNDS,
    ) -> "StepInput":
        """Returns the input with these feeds, whose sequences get rows. Raises as ``BlockTables.update``."""
        return cls([*moves], cleared, [*feeds], tables.update([feed.blocks for feed in feeds]), rounds)

    @classmethod
    def from_numbers(cls, numbers: Numbers, tables: BlockTables) -> "StepInput":
        """Returns the object that ``to_numbers`` was called on, and writes its new blocks into the tables."""
        read = _Reader(numbers)
        num_moves, num_cleared, num_new, num_feeds = read.list(4)
        num_rounds, may_branch = read.list(2)
        moves = [Move(read.array(count), read.array(count)) for count in read.list(num_moves)]
        cleared, new_blocks = read.array(num_cleared), read.array(2 * num_new).reshape(-1, 2)
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
        return cls(moves, cleared, feeds, new_blocks, ForeseenRounds(num_rounds, bool(may_branch)))


NOTHING_FED = StepInput([], NO_SLOTS, [], NOTHING_NEW)


class _Reader:
    """Reads numbers from the front."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._next = 0

    def array(self, count: int) -> Numbers:
        self._next += count
        return self._numbers[self._next - count : self._next]

    def list(self, count: int) -> list[int]:
        numbers: list[int] = self.array(count).tolist()
        return numbers
