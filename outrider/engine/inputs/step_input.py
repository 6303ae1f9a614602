"""Input of a forward pass, and its form as numbers, which rank 0 sends to the ranks of its group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.decoding.draft import Draft

Numbers = NDArray[np.int64]
Rows = slice | torch.Tensor  # indices; a slice if they are consecutive


@dataclass(frozen=True)
class Feed:
    """Tokens that a sequence feeds, and their place in the cache."""

    tokens: list[int]
    num_logits: int  # wanted rows of logits, for the last tokens
    start: int  # number of slots written before
    blocks: Numbers  # blocks of its slots, including the slots fed now
    tree: Draft | None  # pending and fed nodes, if they branch; None: each token sees all tokens before it


@dataclass(frozen=True)
class Move:
    """Cache content that is copied before the pass."""

    source: Numbers  # slots
    target: Numbers  # slots, as many


@dataclass(frozen=True)
class StepInput:
    """Input of a step: moves in order, then slots to clear, then a forward pass over all feeds."""

    moves: list[Move]
    cleared: Numbers  # slots to fill with zeros
    feeds: list[Feed]

    def to_numbers(self) -> Numbers:
        """Returns each list after its length."""
        numbers: list[Sequence[int] | Numbers] = [[len(self.moves), len(self.cleared), len(self.feeds)]]
        for move in self.moves:
            numbers += [[len(move.source)], move.source, move.target]
        numbers += [self.cleared]
        for feed in self.feeds:
            tree = feed.tree or Draft()
            numbers += [[feed.num_logits, feed.start, len(feed.tokens), len(feed.blocks), len(tree)]]
            numbers += [feed.tokens, feed.blocks, tree.tokens, tree.parents]
        return np.concatenate([np.asarray(part, np.int64) for part in numbers])

    @classmethod
    def of(cls, feeds: Sequence[Feed]) -> "StepInput":
        """Returns the input with these feeds, and no change of the cache before them."""
        return cls([], np.zeros(0, np.int64), [*feeds])

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "StepInput":
        """Returns the object that ``to_numbers`` was called on."""
        read = _Reader(numbers)
        num_moves, num_cleared, num_feeds = read.list(3)
        moves = []
        for _ in range(num_moves):
            (count,) = read.list(1)
            moves.append(Move(read.array(count), read.array(count)))
        cleared = read.array(num_cleared)
        feeds = []
        for _ in range(num_feeds):
            num_logits, start, num_tokens, num_blocks, nodes = read.list(5)
            tokens, blocks = read.list(num_tokens), read.array(num_blocks)
            tree = Draft(tuple(read.list(nodes)), tuple(read.list(nodes)))
            feeds.append(Feed(tokens, num_logits, start, blocks, tree if nodes else None))
        return cls(moves, cleared, feeds)


NOTHING_FED = StepInput.of([])


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
