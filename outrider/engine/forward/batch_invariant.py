"""Logits of a token that do not depend, bit for bit, on what else is computed with it.

How a product is split up and added depends on its shape, and the shape of a step on its company: other
sequences, drafted tokens, how a prompt was cut. So a step runs as passes of one shape:

- every forward pass has ROWS tokens, padded: all that a model does to tokens one by one (products, norms,
  activations) always has the same shape, and where in it a token lies changes nothing;
- attention is called per sequence, for QUERIES tokens, padded, over a context whose length follows from their
  positions alone; a drafted token that branches off sees its path as if it were a chain.

A result is the same among processes with the same libraries, kind of processor and number of threads. The
ranks of a tensor-parallel model run the same passes; a sum over two of them has but one order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention_groups import AttentionGroup, QuerySpan
from outrider.engine.forward.batch import Batch
from outrider.engine.step_input import Rows

ROWS = 16
QUERIES = 4
MIXES_ROWS = {"Linear8bitLt": "8 bit products of bitsandbytes depend on the largest of all inputs"}


@dataclass(frozen=True)
class Pass(Batch):
    """ROWS tokens, of which the last may be padding that belongs to no sequence."""

    tiles: list[AttentionGroup]
    wanted: torch.Tensor  # int64: of its rows of logits, those that were asked for

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        return self.tiles

    @property
    def is_padded(self) -> bool:
        return True


@dataclass(frozen=True)
class Place:
    """Where a token of a span stands."""

    row: int  # of the batch
    position: int
    path: tuple[int, ...] | None  # slots of its drafted ancestors and itself, where these are no chain


def passes(batch: Batch, spare_slot: int) -> Iterator[Pass]:
    """The batch's tokens in order, to be run one after the other. Padding is written to ``spare_slot``."""
    device = batch.token_ids.device
    slots = batch.slots
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=device)
    places = [(span, list(_places(span))) for span in batch.spans]
    for start in range(0, batch.num_tokens, ROWS):
        rows = slice(start, min(start + ROWS, batch.num_tokens))
        padding = start + ROWS - rows.stop
        is_wanted = (batch.logit_rows >= start) & (batch.logit_rows < rows.stop)
        wanted = batch.logit_rows[is_wanted] - start
        cut = [
            (span, [place for place in own if rows.start <= place.row < rows.stop]) for span, own in places
        ]
        spans = [
            QuerySpan(span.blocks, own[0].row - start, len(own), own[0].position, None)
            for span, own in cut
            if own
        ]
        yield Pass(
            pad(batch.token_ids[:, rows], (0, padding)),
            pad(batch.position_ids[:, rows], (0, padding)),
            pad(slots[rows], (0, padding), value=spare_slot),
            torch.arange(ROWS if len(wanted) else 0, device=device),
            spans,
            batch.block_size,
            batch.dtype,
            None,
            [
                _group(span, tile, start, batch.block_size, batch.dtype, device)
                for span, own in cut
                for tile in _tiles(own)
            ],
            wanted,
        )


def _places(span: QuerySpan) -> Iterator[Place]:
    root = span.length - len(span.tree) if span.tree is not None else span.length
    for offset, position in enumerate(span.positions()):
        node = span.start + offset - root
        path = None
        if span.tree is not None and node >= 0 and span.tree.depths[node] != node:
            path = tuple(root + ancestor for ancestor in span.tree.path(node))
        yield Place(span.first + offset, position, path)


def _tiles(places: list[Place]) -> Iterator[list[Place]]:
    """Tokens that share a call of attention: neighbours within QUERIES positions, or one off the chain."""
    tile: list[Place] = []
    for place in places:
        if tile and (
            place.path or tile[-1].path or tile[-1].position // QUERIES != place.position // QUERIES
        ):
            yield tile
            tile = []
        tile.append(place)
    if tile:
        yield tile


def _group(
    span: QuerySpan, tile: list[Place], start: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionGroup:
    """The tile as a group of its own, of which all but the values follow from the tokens' positions."""
    rows = [place.row - start for place in tile]
    first = QuerySpan(span.blocks, rows[0], len(rows), tile[0].position, None)
    length = (first.length - 1) // QUERIES * QUERIES + QUERIES
    return AttentionGroup(
        [first],
        QUERIES,
        length,
        # Not as a slice: a copy lies in memory as every other.
        torch.tensor(rows + rows[-1:] * (QUERIES - len(rows)), device=device),
        torch.arange(len(rows), device=device),
        torch.tensor(rows, device=device),
        _context(span, tile[0], first.length, length, block_size, device),
        None,
        dtype,
    )


def _context(
    span: QuerySpan, place: Place, seen: int, length: int, block_size: int, device: torch.device
) -> Rows:
    """Slots of the cache by position; beyond the ``seen`` ones any that its sequence holds."""
    held = len(span.blocks) * block_size
    places = np.minimum(np.arange(length), held - 1)
    if place.path is not None:
        places[seen - len(place.path) : seen] = place.path
    slots: NDArray[np.int64] = span.blocks[places // block_size] * block_size + places % block_size
    if (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[0]) + length)
    return torch.from_numpy(slots).to(device)


def check_rows_are_apart(model: Any, name: str) -> None:
    """
    Raises:
        UnsupportedModelError: one token's result depends on others beyond attention, whatever the shape.
    """
    reasons = {MIXES_ROWS.get(type(module).__name__) for module in model.modules()} - {None}
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        reasons.add("how many tokens an expert multiplies at once depends on the others")
    if reasons:
        raise UnsupportedModelError(
            f"batch_invariant=True with model={name!r}: {'; '.join(map(str, reasons))}"
        )
