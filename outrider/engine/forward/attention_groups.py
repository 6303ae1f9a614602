"""Groups of sequences whose attention is computed in a single call, and their masks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.decoding.draft import Draft
from outrider.engine.cache.windowed_blocks import WindowedBlocks
from outrider.engine.inputs.step_input import Numbers, Rows

SHARED_CALL_QUERIES = 16  # most queries of a sequence in a shared call, padding included
PADDED_SLOTS = 1024  # slots of padding that a group may read; with more, a second call is cheaper


@dataclass(frozen=True)
class QuerySpan:
    """Queries of a sequence in the packed batch."""

    blocks: Numbers  # blocks of its sequence
    first: int  # row of its first query
    count: int  # queries
    start: int  # slots written before this step
    tree: Draft | None  # nodes in the last slots, if they branch; None: each query sees the slots before it
    looks_ahead: bool = False  # whether each query also sees the queries after it

    @property
    def length(self) -> int:
        """Returns the number of slots that its last query may read."""
        return self.start + self.count

    def within(self, windows: WindowedBlocks, block_size: int) -> "QuerySpan":
        """Returns the span in the pool of windowed layers, without the blocks before its first window."""
        root = self.length - (len(self.tree) if self.tree else 0)
        skipped = windows.windowed.first_place(min(self.start, root), block_size)
        blocks = windows.on_host[self.blocks[skipped : -(-self.length // block_size)]]
        return replace(self, blocks=blocks, start=self.start - skipped * block_size)

    def positions(self) -> list[int]:
        """Returns the position of each query."""
        if self.tree is None:
            return list(range(self.start, self.length))
        root = self.length - len(self.tree)
        depths = self.tree.depths[max(0, self.start - root) :]
        return [*range(self.start, root), *(root + depth for depth in depths)]


@dataclass
class AttentionGroup:
    """Spans padded to equal numbers of queries and equal lengths.

    The context is the slice ``view`` of the cache if that is given, else it is gathered from ``blocks``.
    """

    spans: list[QuerySpan]
    num_queries: int  # padding included
    length: int  # slots, padding included
    query_rows: Rows  # [num_lanes * num_queries] rows of the batch; padding repeats a span's last row
    real: torch.Tensor | None  # indices in query_rows without padding; None: there is no padding
    output_rows: Rows  # [real] rows of the batch
    view: slice | None
    blocks: torch.Tensor | None  # int64 [num_lanes * blocks per span]
    dtype: torch.dtype
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def is_plainly_causal(self, window: int | None) -> bool:
        """Whether a causal flag can replace the mask: a single span, with nothing cached before it."""
        span = self.spans[0]
        is_chain = span.tree is None and not span.looks_ahead
        return len(self.spans) == 1 and span.start == 0 and is_chain and not self._cuts(window)

    def mask(self, window: int | None, repeats: int, device: torch.device) -> torch.Tensor | None:
        """Returns the additive mask, [num_lanes, 1, repeats * num_queries, length]; None: all is visible.

        Args:
            window: positions that a query sees, its own included; None: all positions before it.
            repeats: query heads folded into the query axis.
        """
        if (
            self.num_queries == 1
            and not self._cuts(window)
            and all(span.length == self.length and span.tree is None for span in self.spans)
        ):
            return None
        if (window, repeats) not in self._masks:
            hidden = torch.from_numpy(~self._visible(window)).to(device)
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device).masked_fill_(hidden, -math.inf)
            self._masks[window, repeats] = mask.repeat(1, repeats, 1)[:, None]
        return self._masks[window, repeats]

    def _cuts(self, window: int | None) -> bool:
        return window is not None and self.length > window

    def _visible(self, window: int | None) -> NDArray[np.bool_]:
        """Returns the slots that each query sees: bool [num_lanes, num_queries, length]."""
        slots = np.arange(self.length)
        starts = np.array([span.start for span in self.spans])[:, None]
        last = np.array([span.count - 1 for span in self.spans])[:, None]
        query_slots = starts + np.minimum(np.arange(self.num_queries), last)  # [num_lanes, num_queries]
        visible: NDArray[np.bool_] = slots <= query_slots[:, :, None]
        query_positions = query_slots.copy()
        slot_positions = np.tile(slots, (len(self.spans), 1))
        for index, span in enumerate(self.spans):
            if span.looks_ahead:
                visible[index] = slots < span.length
            if span.tree is not None:
                self._branch(span, span.tree, visible[index], query_positions[index], slot_positions[index])
        if window is not None:
            visible &= query_positions[:, :, None] - slot_positions[:, None] < window
        return visible

    @staticmethod
    def _branch(
        span: QuerySpan,
        tree: Draft,
        visible: NDArray[np.bool_],
        query_positions: NDArray[np.int64],
        slot_positions: NDArray[np.int64],
    ) -> None:
        """Restricts a span's drafted nodes to their own ancestors among drafted nodes."""
        root = span.length - len(tree)
        nodes = min(len(tree), span.count)
        slot_positions[root : span.length] = root + np.array(tree.depths)
        visible[span.count - nodes : span.count, root : span.length] = np.array(tree.ancestor_mask())[-nodes:]
        visible[span.count :] = visible[span.count - 1]
        query_positions[: span.count] = span.positions()
        query_positions[span.count :] = query_positions[span.count - 1]


def form_groups(
    spans: Sequence[QuerySpan], block_size: int, dtype: torch.dtype, device: torch.device
) -> list[AttentionGroup]:
    """Splits the spans into groups with similar numbers of queries and similar lengths."""
    single = [span for span in spans if span.count == 1]
    few = [span for span in spans if 1 < span.count <= SHARED_CALL_QUERIES]
    many = [[span] for span in spans if span.count > SHARED_CALL_QUERIES]
    members = [*_alike_lengths(single), *_alike_lengths(few), *many]
    return [_group(spans, block_size, dtype, device) for spans in members]


def _alike_lengths(spans: list[QuerySpan]) -> Iterator[list[QuerySpan]]:
    group: list[QuerySpan] = []
    padded = 0
    for span in sorted(spans, key=lambda span: span.length, reverse=True):
        padded += group[0].length - span.length if group else 0
        if padded > PADDED_SLOTS:
            yield _in_batch_order(group)
            group, padded = [], 0
        group.append(span)
    if group:
        yield _in_batch_order(group)


def _in_batch_order(spans: list[QuerySpan]) -> list[QuerySpan]:
    return sorted(spans, key=lambda span: span.first)


def _group(
    spans: list[QuerySpan], block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionGroup:
    num_queries = max(span.count for span in spans)
    length = max(span.length for span in spans)
    is_padded = any(span.count < num_queries for span in spans)
    output_rows = [row for span in spans for row in range(span.first, span.first + span.count)]
    query_rows, real = output_rows, None
    if is_padded:
        query_rows = [span.first + min(i, span.count - 1) for span in spans for i in range(num_queries)]
        real = torch.tensor([n * num_queries + i for n, span in enumerate(spans) for i in range(span.count)])
        real = real.to(device)
    view = _view(spans[0], block_size) if len(spans) == 1 else None
    return AttentionGroup(
        spans,
        num_queries,
        length,
        as_rows(query_rows, device),
        real,
        as_rows(output_rows, device),
        view,
        None if view else _blocks(spans, length, block_size, device),
        dtype,
    )


def _view(span: QuerySpan, block_size: int) -> slice | None:
    """Returns the span's context as a slice of the cache; None if its blocks are not consecutive."""
    count = -(-span.length // block_size)
    first = int(span.blocks[0])
    if span.blocks[count - 1] - first != count - 1:
        return None
    if count > 1 and not (np.diff(span.blocks[:count]) == 1).all():
        return None
    return slice(first * block_size, first * block_size + span.length)


def _blocks(spans: list[QuerySpan], length: int, block_size: int, device: torch.device) -> torch.Tensor:
    blocks = np.empty((len(spans), -(-length // block_size)), np.int64)
    for index, span in enumerate(spans):
        count = -(-span.length // block_size)
        blocks[index, :count] = span.blocks[:count]
        blocks[index, count:] = span.blocks[count - 1]  # padding; other sequences' blocks may not be finite
    return torch.from_numpy(blocks.ravel()).to(device)


def as_rows(rows: list[int], device: torch.device) -> Rows:
    """Returns the rows as indices, or as a slice if they are consecutive: a slice needs no copy."""
    if rows[-1] - rows[0] == len(rows) - 1 and all(b - a == 1 for a, b in pairwise(rows)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
