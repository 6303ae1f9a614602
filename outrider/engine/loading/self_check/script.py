"""Script of a self-check: two texts, Drafts after the first text, and their division into steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Any

import numpy as np

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import HeldState
from outrider.engine.inputs.step_input import Feed

LENGTH, SHORTEST = 26, 14  # tokens: most of a path, and the shortest context that is checked
PARENTS = (ROOT, ROOT, 0, 0, 1, 2, 3, 4, 5, 6, 7)  # parents of the tree's nodes, level by level
LEVELS, LEAVES = 4, (8, 9, 10)
SINGLES = 5
TEXTS = 2


@dataclass(frozen=True)
class Row:
    """A token of our steps, and its place in transformers' runs."""

    kind: str
    path: int
    position: int


@dataclass(frozen=True)
class Script:
    """Texts and steps of a self-check."""

    paths: list[list[int]]  # texts of equal length
    steps: list[list[Feed]]
    rows: list[Row]  # a row for each token that the steps feed
    cut: int  # position at which transformers' second piece begins


def write_script(length: int, tokens: Iterator[int], block_size: int, window: int | None) -> Script:
    """Returns a script of paths of ``length`` tokens. window: positions of a sliding window, if any."""
    first, second, nodes = ([next(tokens) for _ in range(n)] for n in (length, length, len(PARENTS)))
    tree = Draft(tuple(nodes), PARENTS)
    root, chunk = length - LEVELS, length // 3
    prompt = root - 1  # the last committed token is fed with the drafted tokens
    blocks = np.arange(blocks_needed(block_size))
    # Consecutive blocks of a text are not neighbours in the cache.
    one = HeldBlocks(blocks[1::2][::-1]), HeldState(0)
    other = HeldBlocks(blocks[::2]), HeldState(1)
    near = prompt if window is None else min(window, prompt)
    rows = _rows("packed prompts", 0, 0, near) + _rows("beyond the sliding window", 0, near, prompt)
    rows += _rows("packed prompts", 1, 0, chunk)
    rows += _rows("a second chunk", 1, chunk, length - 1)
    singles = range(length - SINGLES, length)
    rows += _rows("a drafted chain", 0, prompt, length) + _rows("single tokens", 1, length - SINGLES, length)
    rows += _rows("a drafted chain", 0, prompt, root)
    for node, depth in enumerate(tree.depths):
        leaf = next(place for place, leaf in enumerate(LEAVES) if node in tree.path(leaf))
        rows.append(Row("a drafted tree", 2 + leaf, root + depth))
    return Script(
        [first, second, *(first[:root] + [nodes[node] for node in tree.path(leaf)] for leaf in LEAVES)],
        [
            [_feed(first[:prompt], 0, one, prompt), _feed(second[:chunk], 0, other, chunk)],
            [_feed(second[chunk:-1], chunk, other, length - SINGLES)],
            [_feed(first[prompt:], prompt, one), *(_feed([second[n]], n, other) for n in singles)],
            [_feed([first[prompt], *nodes], prompt, one, tree=tree)],
        ],
        rows,
        length // 2,
    )


def _feed(
    tokens: list[int],
    start: int,
    held: tuple[HeldBlocks, HeldState],
    committed: int = 0,
    tree: Draft | None = None,
) -> Feed:
    blocks, state = held
    return Feed(tokens, len(tokens), start, blocks, tree, state=state, committed=committed)


def _rows(kind: str, path: int, start: int, end: int) -> list[Row]:
    return [Row(kind, path, position) for position in range(start, end)]


def blocks_needed(block_size: int) -> int:
    """Returns the number of blocks of the cache that the steps need."""
    return 2 * -(-(LENGTH - LEVELS + len(PARENTS)) // block_size)


def pick_tokens(config: Any) -> Iterator[int]:
    """Returns token ids in a fixed pseudorandom order, without special tokens."""
    size = config.get_text_config().vocab_size
    named = [value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index"))]
    return cycle(
        [token for token in Random(0).sample(range(size), min(size, 4 * LENGTH)) if token not in named]
    )
