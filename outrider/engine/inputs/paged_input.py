"""Input of the paged kernels: named fields of a step's buffer, filled for all sequences at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.decoding.draft import MAX_NODES, Draft
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.context_parts import SHORTEST
from outrider.engine.inputs.step_buffer import Field, StepBuffer, buffer_size
from outrider.engine.inputs.step_input import Feed, Numbers

FEW_QUERIES = 32  # queries of a sequence: up to this many are a Draft to verify, more are a prompt
FEW_TILE, MANY_TILE = 8, 64  # rows of a tile
TILE_FIELDS = 5  # row of the block table, first row, number of rows, slots up to the last row, root
LANE, END = 0, 3  # places of the first and the fourth tile field
SPLIT_TILES = 64  # tiles, of which fewer are split: those longer than a 64th of all contexts
WORD_BITS = 64
LONGEST_PATH = 64  # drafted nodes for which a padded layout has room
NO_ROOT = 2**30  # above every slot
# Numbers of PagedInput.work. Tiles and rows are counted without padding.
WORK = ("many_tiles", "few_tiles", "split_tiles", "slots_of_longest_split", "rows")

Array = TypeVar("Array")


@dataclass(frozen=True)
class PagedLayout:
    """Sizes of the buffer: rows, tiles, blocks and nodes that it has room for."""

    rows: int
    logits: int
    lanes: int  # sequences
    blocks: int  # blocks of the longest sequence
    words: int  # words of a tree's masks
    few_tiles: int
    many_tiles: int
    path_length: int = 0  # drafted nodes, if a row's path is read as a chain; 0: masks hide other nodes

    @classmethod
    def of(cls, feeds: Sequence[Feed], block_size: int) -> "PagedLayout":
        """Returns a layout with room for these feeds and no more."""
        counts = np.array([len(feed.tokens) for feed in feeds])
        is_few = counts <= FEW_QUERIES
        nodes = max(len(feed.tree) if feed.tree else 0 for feed in feeds)
        return cls(
            rows=int(counts.sum()),
            logits=sum(feed.num_logits for feed in feeds),
            lanes=len(feeds),
            blocks=max(-(-(feed.start + len(feed.tokens)) // block_size) for feed in feeds),
            words=-(-nodes // WORD_BITS),
            few_tiles=int((-(-counts[is_few] // FEW_TILE)).sum()),
            many_tiles=int((-(-counts[~is_few] // MANY_TILE)).sum()),
        )

    @classmethod
    def padded(cls, rows: int, blocks: int, *, as_chains: bool) -> "PagedLayout":
        """Returns a layout with room for any sequences that feed this many rows together, few each.

        as_chains: whether each row's path is read as a chain.
        """
        words, path_length = (0, LONGEST_PATH) if as_chains else (MAX_NODES // WORD_BITS, 0)
        return cls(rows, rows, rows, blocks, words, rows, 0, path_length)

    def with_prompts(self, logits: int) -> "PagedLayout":
        """Returns a padded layout with room for prompts among its rows. logits: rows of logits."""
        return replace(self, logits=logits, many_tiles=-(-self.rows // (FEW_QUERIES + 1)))

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of PagedInput. Graphs use a part of the last field's lanes, so nothing before it moves."""
        return _fields_of(self)


@lru_cache(maxsize=1024)  # steps repeat their layouts
def _fields_of(layout: PagedLayout) -> dict[str, Field]:
    rows = (layout.rows,)
    shapes = {
        "token_ids": (1, layout.rows),
        "position_ids": (1, layout.rows),
        "slots": rows,
        "seen": rows,
        "ancestors": (layout.rows, layout.words),
        "paths": (layout.rows, layout.path_length),
        "logit_rows": (layout.logits,),
        "work": (len(WORK),),
        "few_tiles": (layout.few_tiles, TILE_FIELDS),
        "many_tiles": (layout.many_tiles, TILE_FIELDS),
        "block_table": (layout.lanes, layout.blocks),
    }
    return {name: Field(shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class PagedInput(Generic[Array]):
    """Arrays of int64. A tile is consecutive rows of a sequence."""

    token_ids: Array  # [1, rows]
    position_ids: Array  # [1, rows]
    slots: Array  # [rows] slots of the tokens' keys and values
    seen: Array  # [rows] number of leading slots that are all visible
    ancestors: Array  # [rows, words] bits of the nodes, from the root on, that are also visible
    paths: Array  # [rows, path_length] path of a row that is off its Draft's chain
    logit_rows: Array  # [logits]
    work: Array  # [5] numbers of WORK
    few_tiles: (
        Array  # [few_tiles, TILE_FIELDS] tiles of at most FEW_TILE rows, split tiles first; 0 rows: padding
    )
    many_tiles: Array  # [many_tiles, TILE_FIELDS] tiles of at most MANY_TILE rows
    block_table: Array  # [lanes, blocks] undefined after a sequence's own blocks

    @classmethod
    def of(cls, fields: Mapping[str, Array]) -> "PagedInput[Array]":
        """Returns the input with its fields among those of a step."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


def fill(
    layout: PagedLayout,
    feeds: Sequence[Feed],
    block_size: int,
    spare_slot: int,
    choice: ChoiceInput | None = None,
    *,
    device: torch.device,
) -> StepBuffer:
    """Makes a step's buffer; rows of the layout beyond the feeds are padding, written to ``spare_slot``.

    Args:
        choice: input of the choice of tokens, whose fields follow; None: no such fields.
        device: device to which the buffer is sent.
    """
    buffer = StepBuffer(layout.fields | ({} if choice is None else choice.fields), device)
    if choice is not None:
        choice.write(buffer)
    numbers: PagedInput[Numbers] = PagedInput.of(buffer.arrays)
    buffer.clear(buffer_size(layout.fields) - buffer_size({"block_table": layout.fields["block_table"]}))
    counts = np.array([len(feed.tokens) for feed in feeds], np.int64)
    starts = np.array([feed.start for feed in feeds], np.int64)
    firsts = np.cumsum(counts) - counts
    num_rows = int(counts.sum())
    lanes = np.repeat(np.arange(len(feeds)), counts)
    places = np.arange(num_rows) + np.repeat(starts - firsts, counts)
    for lane, feed in enumerate(feeds):
        held = min(len(feed.blocks), layout.blocks)
        numbers.block_table[lane, :held] = feed.blocks[:held]
    numbers.token_ids[0, :num_rows] = np.fromiter(
        chain.from_iterable(feed.tokens for feed in feeds), np.int64, num_rows
    )
    numbers.position_ids[0, :num_rows] = places
    numbers.slots[:num_rows] = (
        numbers.block_table[lanes, places // block_size] * block_size + places % block_size
    )
    numbers.slots[num_rows:] = spare_slot
    numbers.seen[:num_rows] = places + 1
    wanted = np.array([feed.num_logits for feed in feeds], np.int64)
    skipped = np.repeat(firsts + counts - wanted - (np.cumsum(wanted) - wanted), wanted)
    numbers.logit_rows[: len(skipped)] = np.arange(len(skipped)) + skipped
    spans = _spans_of_chains(numbers, feeds, firsts) if layout.path_length else _spans(numbers, feeds, firsts)
    is_few = (spans.counts <= FEW_QUERIES) | bool(layout.path_length)
    few_tiles = _tiles(FEW_TILE, spans, np.flatnonzero(is_few))
    many_tiles = _tiles(MANY_TILE, spans, np.flatnonzero(~is_few))
    is_split = _are_split(few_tiles[:, END])
    split = few_tiles[is_split]
    numbers.few_tiles[: len(few_tiles)] = np.concatenate([split, few_tiles[~is_split]])
    numbers.many_tiles[: len(many_tiles)] = many_tiles
    longest = split[:, END].max(initial=0)
    numbers.work[:] = len(many_tiles), len(few_tiles), len(split), longest, num_rows
    return buffer


@dataclass(frozen=True)
class _Spans:
    """Consecutive rows that may share tiles; arrays [num_spans]."""

    lanes: Numbers
    firsts: Numbers  # first rows
    counts: Numbers  # rows
    starts: Numbers  # slots before the first row's
    roots: Numbers  # first slots that are not all visible, or are at other places; NO_ROOT: none


def _spans(numbers: PagedInput[Numbers], feeds: Sequence[Feed], firsts: Numbers) -> _Spans:
    """Returns a span for each sequence; drafted nodes see only their ancestors among drafted nodes."""
    roots = np.full(len(feeds), NO_ROOT)
    for lane, feed in enumerate(feeds):
        if feed.tree is not None:
            end = int(firsts[lane]) + len(feed.tokens)
            roots[lane] = _root(feed)
            nodes = min(len(feed.tree), len(feed.tokens))
            _branch(numbers, feed.tree, slice(end - nodes, end), int(roots[lane]))
    counts = np.array([len(feed.tokens) for feed in feeds], np.int64)
    starts = np.array([feed.start for feed in feeds], np.int64)
    return _Spans(np.arange(len(feeds)), firsts, counts, starts, roots)


def _spans_of_chains(numbers: PagedInput[Numbers], feeds: Sequence[Feed], firsts: Numbers) -> _Spans:
    """Returns a span for each sequence's chain, and for each drafted node off the chain."""
    spans: list[tuple[int, int, int, int, int]] = []
    for lane, feed in enumerate(feeds):
        first, count, root = int(firsts[lane]), len(feed.tokens), _root(feed)
        on_chain = count if feed.tree is None else min(count, root + feed.tree.chain_length - feed.start)
        if on_chain > 0:
            spans.append((lane, first, on_chain, feed.start, NO_ROOT))
        for offset in range(max(on_chain, 0), count):
            assert feed.tree is not None
            row, path = first + offset, feed.tree.path(feed.start + offset - root)
            end = root + len(path)
            numbers.paths[row, : len(path)] = path
            numbers.position_ids[0, row] = end - 1
            numbers.seen[row] = end
            spans.append((lane, row, 1, end - 1, root))
    return _Spans(*np.array(spans, np.int64).reshape(-1, 5).T)


def _root(feed: Feed) -> int:
    """Returns the slot of its Draft's first node."""
    return feed.start + len(feed.tokens) - (len(feed.tree) if feed.tree else 0)


def _branch(numbers: PagedInput[Numbers], tree: Draft, rows: slice, root: int) -> None:
    """Lets drafted nodes, the last of which are fed, see only their drafted ancestors."""
    count = rows.stop - rows.start
    numbers.position_ids[0, rows] = root + np.array(tree.depths[-count:])
    numbers.seen[rows] = root
    bits = np.packbits(np.array(tree.ancestor_mask()[-count:]), axis=1, bitorder="little")
    numbers.ancestors[rows].view(np.uint8)[:, : bits.shape[1]] = bits


def _tiles(rows: int, spans: _Spans, chosen: Numbers) -> Numbers:
    """Cuts these spans into tiles of at most ``rows`` rows; returns them, [num_tiles, TILE_FIELDS]."""
    num_tiles = -(-spans.counts[chosen] // rows)
    of_tile = np.repeat(chosen, num_tiles)
    index = np.arange(len(of_tile)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    before = index * rows
    held = np.minimum(spans.counts[of_tile] - before, rows)
    ends = spans.starts[of_tile] + before + held
    columns = (spans.lanes[of_tile], spans.firsts[of_tile] + before, held, ends, spans.roots[of_tile])
    return np.stack(columns, axis=1)


def _are_split(ends: Numbers) -> NDArray[np.bool_]:
    """Whether several programs share each tile's context: fewer than SPLIT_TILES of a step.

    ends: [num_tiles] slots of each tile's context.
    """
    are_split: NDArray[np.bool_] = (ends > SHORTEST) & (ends * SPLIT_TILES > ends.sum())
    return are_split
