"""Input of the paged kernels: named fields of a step's buffer, filled for all sequences at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.draft import MAX_NODES, Draft
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.context_parts import SHORTEST
from outrider.engine.inputs.step_buffer import Field, StepBuffer
from outrider.engine.inputs.step_input import Feed, Numbers, StepInput

FEW_QUERIES = 32  # most queries of a sequence that count as a Draft to verify; more count as a prompt
FEW_TILE, MANY_TILE = 8, 64  # rows of a tile, in a sequence with few and with many queries
TILE_FIELDS = 5  # row of the block tables, first row, number of rows, slots up to the last row, root
LANE, FIRST, END = 0, 1, 3  # indices of tile fields
ADAPTER_TILE = 16  # rows of a tile that has an adapter: the fewest that tensor cores take
ADAPTER_FIELDS = 3  # adapter, index in ``adapter_rows`` of the first row, number of rows
SPLIT_TILES = 64  # a tile is split if its context exceeds 1/64 of all contexts: at most 63 tiles
# Rows times query heads that a program attends with to latents in parts: with more, the sums would need more
# registers than a thread has.
LINES_OF_LATENTS = 16
# Query heads of all tiles that are split, at most, if they attend to latents. With 118 parts, the partial
# results of their 8 rows take 2 GB.
SPLIT_HEADS_OF_LATENTS = 1024
WORD_BITS = 64
LONGEST_PATH = 64  # drafted nodes of a path for which a padded layout has room
NO_ROOT = 2**30  # above every slot
# Numbers of PagedInput.work. Tiles and rows are counted without padding.
WORK = ("few_tiles", "split_tiles", "slots_of_longest_split", "rows", "new_blocks")

Array = TypeVar("Array")


@dataclass(frozen=True)
class PagedLayout:
    """Sizes of a step's buffer: rows, tiles, new blocks and nodes for which it has room."""

    rows: int
    logits: int
    lanes: int  # sequences
    new_blocks: int
    words: int  # words of a mask of drafted nodes
    few_tiles: int
    many_tiles: int
    path_length: int = 0  # drafted nodes of a path, if rows read paths as chains; 0: masks hide other nodes
    adapter_tiles: int = 0  # tiles of rows that have adapters; 0: no row is told its adapter

    @classmethod
    def of(cls, step: StepInput) -> "PagedLayout":
        """Returns a layout with room for this step and no more."""
        feeds = step.feeds
        counts = np.array([len(feed.tokens) for feed in feeds])
        is_few = counts <= FEW_QUERIES
        nodes = max(len(feed.tree) if feed.tree else 0 for feed in feeds)
        return cls(
            rows=int(counts.sum()),
            logits=sum(feed.num_logits for feed in feeds),
            lanes=len(feeds),
            new_blocks=len(step.new_blocks),
            words=-(-nodes // WORD_BITS),
            few_tiles=int((-(-counts[is_few] // FEW_TILE)).sum()),
            many_tiles=int((-(-counts[~is_few] // MANY_TILE)).sum()),
        )

    @classmethod
    def padded(cls, rows: int, *, as_chains: bool) -> "PagedLayout":
        """Returns a layout for any sequences with FEW_QUERIES or fewer rows each, ``rows`` in total.

        as_chains: whether each row reads its path as a chain.
        """
        words, path_length = (0, LONGEST_PATH) if as_chains else (MAX_NODES // WORD_BITS, 0)
        return cls(rows, rows, rows, 0, words, rows, 0, path_length)

    def with_prompts(self, logits: int) -> "PagedLayout":
        """Returns a padded layout with room for prompts among its rows. logits: rows of logits."""
        return replace(self, logits=logits, many_tiles=-(-self.rows // (FEW_QUERIES + 1)))

    def with_adapters(self, adapters: int) -> "PagedLayout":
        """Returns a layout with room for any choice of adapters of its rows. adapters: number of adapters."""
        first = min(self.rows, adapters)  # rows that each begin the first tile of an adapter
        tiles = first + (self.rows - first) // ADAPTER_TILE
        return replace(self, adapter_tiles=tiles if adapters else 0)

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of a step's buffer. CUDA graphs shorten only the last field, so no other field moves."""
        return _fields_of(self)


def split_tiles_of(heads: int, *, caches_latents: bool) -> int:
    """Returns the number of split tiles for whose partial results attention has memory.

    The context of any further tile is read by a single program, with the same result.

    heads: query heads.
    """
    return max(1, min(SPLIT_TILES, SPLIT_HEADS_OF_LATENTS // heads)) if caches_latents else SPLIT_TILES


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
        "lanes": (layout.lanes,),
        "adapter_rows": (layout.rows if layout.adapter_tiles else 0,),
        "adapter_tiles": (layout.adapter_tiles, ADAPTER_FIELDS),
    }
    fields = {name: Field(shape) for name, shape in shapes.items()}
    return fields | {"new_blocks": Field((layout.new_blocks, 2), "int32")}


@dataclass(frozen=True)
class PagedInput(Generic[Array]):
    """Arrays of int64, unless stated otherwise. A tile is a range of consecutive rows of a sequence."""

    token_ids: Array  # [1, rows]
    position_ids: Array  # [1, rows]
    slots: Array  # [rows] slots of the tokens' keys and values
    seen: Array  # [rows] number of leading slots that are all visible
    ancestors: Array  # [rows, words] bits of the drafted nodes, from the root on, that are also visible
    paths: Array  # [rows, path_length] path of a row that is off its Draft's chain
    logit_rows: Array  # [logits]
    work: Array  # [5] numbers of WORK
    few_tiles: Array  # [few_tiles, TILE_FIELDS] of at most FEW_TILE rows, split tiles first; 0 rows: padding
    many_tiles: Array  # [many_tiles, TILE_FIELDS] tiles of at most MANY_TILE rows
    lanes: Array  # [lanes] row of the block tables of each sequence
    adapter_rows: Array  # [rows] rows in the order of their adapters, or [0]
    adapter_tiles: Array  # [adapter_tiles, ADAPTER_FIELDS] rows that have an adapter; 0 rows: padding
    new_blocks: Array  # int32 [new_blocks, 2] index into the flattened block tables, and block
    block_tables: Array  # BlockTables.on_device, int32 on a GPU

    @classmethod
    def of(cls, fields: Mapping[str, Array], block_tables: Array) -> "PagedInput[Array]":
        """Returns the input whose fields are among these fields of a step."""
        names = [name for name in cls.__dataclass_fields__ if name != "block_tables"]
        return cls(**{name: fields[name] for name in names}, block_tables=block_tables)


def fill(
    layout: PagedLayout, step: StepInput, tables: BlockTables, choice: ChoiceInput | None = None
) -> StepBuffer:
    """Makes a step's buffer. Rows after the feeds are padding, which is written to the spare slot.

    choice: input of the choice of tokens, whose fields follow; None: no such fields.
    """
    feeds, block_size = step.feeds, tables.block_size
    buffer = StepBuffer(layout.fields | ({} if choice is None else choice.fields), tables.device)
    if choice is not None:
        choice.write(buffer)
    numbers = PagedInput.of(buffer.arrays, tables.on_host)
    buffer.clear_before("new_blocks")
    counts = np.array([len(feed.tokens) for feed in feeds], np.int64)
    starts = np.array([feed.start for feed in feeds], np.int64)
    firsts = counts.cumsum() - counts
    num_rows = int(counts.sum())
    rows = np.array([feed.row for feed in feeds], np.int64)  # rows of the block tables
    numbers.lanes[: len(feeds)] = rows
    numbers.new_blocks[: len(step.new_blocks)] = step.new_blocks
    places = np.arange(num_rows) + (starts - firsts).repeat(counts)
    numbers.token_ids[0, :num_rows] = np.fromiter(
        chain.from_iterable([feed.tokens for feed in feeds]), np.int64, num_rows
    )
    numbers.position_ids[0, :num_rows] = places
    numbers.slots[:num_rows] = (
        tables.on_host[rows.repeat(counts), places // block_size] * block_size + places % block_size
    )
    numbers.slots[num_rows:] = tables.spare_slot
    numbers.seen[:num_rows] = places + 1
    wanted = np.array([feed.num_logits for feed in feeds], np.int64)
    skipped = (firsts + counts - wanted.cumsum()).repeat(wanted)
    numbers.logit_rows[: len(skipped)] = np.arange(len(skipped)) + skipped
    looking_ahead = [number for number, feed in enumerate(feeds) if feed.looks_ahead]
    for number in looking_ahead:
        numbers.seen[firsts[number] :][: counts[number]] = starts[number] + counts[number]
    spans = _Spans(rows, firsts, counts, starts, np.full(len(feeds), NO_ROOT))
    if [feed for feed in feeds if feed.tree is not None]:
        spans_of = _spans_of_chains if layout.path_length else _spans
        spans = spans_of(numbers, feeds, spans)
    is_few = (spans.counts <= FEW_QUERIES) | bool(layout.path_length)
    few_tiles = _tiles(FEW_TILE, spans, np.flatnonzero(is_few))
    many_tiles = _tiles(MANY_TILE, spans, np.flatnonzero(~is_few))
    for tiles in (few_tiles, many_tiles) if looking_ahead else ():
        tiles[:, END] = np.maximum(tiles[:, END], numbers.seen[tiles[:, FIRST]])
    is_split = _are_split(few_tiles[:, END])
    split = few_tiles[is_split]
    numbers.few_tiles[: len(few_tiles)] = np.concatenate([split, few_tiles[~is_split]])
    numbers.many_tiles[: len(many_tiles)] = many_tiles
    longest = split[:, END].max(initial=0)
    numbers.work[:] = len(few_tiles), len(split), longest, num_rows, len(step.new_blocks)
    if layout.adapter_tiles and [feed for feed in feeds if feed.adapter]:
        _write_adapters(numbers, np.array([feed.adapter for feed in feeds]).repeat(counts))
    return buffer


@dataclass(frozen=True)
class _Spans:
    """Consecutive rows that may share tiles; arrays [num_spans]."""

    lanes: Numbers  # rows of the block tables
    firsts: Numbers  # first rows
    counts: Numbers  # rows
    starts: Numbers  # slots before the slot of the first row
    roots: Numbers  # slots of the first drafted node, from which on masks or paths apply; NO_ROOT: none


def _spans(numbers: PagedInput[Numbers], feeds: Sequence[Feed], whole: _Spans) -> _Spans:
    """Returns a span for each sequence; drafted nodes see only their ancestors among drafted nodes.

    whole: spans of these sequences as if all were chains.
    """
    roots = whole.roots.copy()
    for number, feed in enumerate(feeds):
        if feed.tree is not None:
            end = int(whole.firsts[number]) + len(feed.tokens)
            roots[number] = _root(feed)
            nodes = min(len(feed.tree), len(feed.tokens))
            _branch(numbers, feed.tree, slice(end - nodes, end), int(roots[number]))
    return replace(whole, roots=roots)


def _spans_of_chains(numbers: PagedInput[Numbers], feeds: Sequence[Feed], whole: _Spans) -> _Spans:
    """Returns a span for each sequence's chain, and for each drafted node off the chain.

    whole: argument of ``_spans``.
    """
    spans: list[tuple[int, int, int, int, int]] = []
    for lane, first, feed in zip(whole.lanes.tolist(), whole.firsts.tolist(), feeds, strict=True):
        count, root = len(feed.tokens), _root(feed)
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
    """Restricts the fed nodes of a tree, which are its last nodes, to their ancestors in the tree."""
    count = rows.stop - rows.start
    numbers.position_ids[0, rows] = root + np.array(tree.depths[-count:])
    numbers.seen[rows] = root
    bits = np.packbits(np.array(tree.ancestor_mask()[-count:]), axis=1, bitorder="little")
    numbers.ancestors[rows].view(np.uint8)[:, : bits.shape[1]] = bits


def _tiles(rows: int, spans: _Spans, chosen: Numbers) -> Numbers:
    """Cuts these spans into tiles of at most ``rows`` rows; returns them, [num_tiles, TILE_FIELDS]."""
    if not len(chosen):
        return np.empty((0, TILE_FIELDS), np.int64)
    num_tiles = -(-spans.counts[chosen] // rows)
    if len(spans.counts) == len(chosen) == num_tiles.sum():  # each span is a tile
        ends = spans.starts + spans.counts
        return np.array((spans.lanes, spans.firsts, spans.counts, ends, spans.roots)).T
    of_tile = chosen.repeat(num_tiles)
    index = np.arange(len(of_tile)) - (num_tiles.cumsum() - num_tiles).repeat(num_tiles)
    before = index * rows
    held = np.minimum(spans.counts[of_tile] - before, rows)
    ends = spans.starts[of_tile] + before + held
    columns = (spans.lanes[of_tile], spans.firsts[of_tile] + before, held, ends, spans.roots[of_tile])
    return np.array(columns).T


def _write_adapters(numbers: PagedInput[Numbers], of_rows: Numbers) -> None:
    """Writes the tiles of rows that have adapters. of_rows: [num_rows] adapter of each row; 0: none."""
    numbers.adapter_rows[: len(of_rows)] = of_rows.argsort(kind="stable")
    adapters, counts = np.unique(of_rows, return_counts=True)
    ends = counts.cumsum()
    tiles = [
        (adapter, first, min(end - first, ADAPTER_TILE))
        for adapter, begin, end in zip(adapters, ends - counts, ends, strict=True)
        if adapter
        for first in range(begin, end, ADAPTER_TILE)
    ]
    numbers.adapter_tiles[: len(tiles)] = tiles


def _are_split(ends: Numbers) -> NDArray[np.bool_]:
    """Returns for each tile whether several programs share its context, fewer than SPLIT_TILES tiles.

    ends: [num_tiles] slots of each tile's context.
    """
    are_split: NDArray[np.bool_] = (ends > SHORTEST) & (ends * SPLIT_TILES > ends.sum())
    return are_split
