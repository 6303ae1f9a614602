"""Logits of a token that do not depend, bit for bit, on what else is computed with it.

How a product is split up and added depends on its shape, and the shape of a step on its company: other
sequences, drafted tokens, how a prompt was cut. So a step runs as passes of one shape:

- every forward pass has as many tokens, padded: all that a model does to tokens one by one (products, norms,
  activations) always has the same shape, and where in it a token lies changes nothing;
- the kernels of attention split a context at fixed places, and what a tile holds besides changes nothing;
- without them attention is called per sequence, for QUERIES tokens, padded, over a context whose length
  follows from their positions alone;
- a drafted token that branches off sees its path as if it were a chain.

A result is the same among processes with the same libraries, kind of processor and number of threads. The
ranks of a tensor-parallel model run the same passes, and add up in the order of their numbers
(outrider/engine/parallel/sums.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention_groups import AttentionGroup, QuerySpan
from outrider.engine.forward.batch import Batch, pack
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.choice_input import ChoiceInput, PackedRows
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import Feed, Rows
from outrider.engine.step_timings import Path

# Tokens of a pass, by the kind of device: a GPU takes hardly longer for 64 than for one.
ROWS = {"cpu": 16, "cuda": 64}
QUERIES = 4
MIXES_ROWS = {"Linear8bitLt": "8 bit products of bitsandbytes depend on the largest of all inputs"}


@dataclass(frozen=True)
class Passes:
    """A step as passes that run one after the other."""

    parts: list[Batch]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def path(self) -> Path:
        """Returns the way in which the last pass is computed."""
        return self.parts[-1].path

    @property
    def choice(self) -> PackedRows | None:
        """Returns the rows that choose, of the last pass; it may take the memory of earlier passes."""
        return self.parts[-1].choice


@dataclass(frozen=True)
class PaddedPass(Batch):
    """ROWS tokens of its device, of which the last may be padding that belongs to no sequence."""

    tiles: list[AttentionGroup]  # for attention without the paged kernel
    num_real: int  # tokens
    wanted: torch.Tensor  # int64: of its rows of logits, those that were asked for

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        return self.tiles

    @property
    def num_tokens(self) -> int:
        return self.num_real

    @property
    def is_padded(self) -> bool:
        return True

    def without_padding(self, output: ForwardOutput) -> ForwardOutput:
        hidden = None if output.hidden is None else output.hidden[: self.num_real]
        logits = output.logits[self.wanted] if len(self.wanted) else output.logits
        return ForwardOutput(logits, hidden, output.are_finite[: self.num_real])


@dataclass(frozen=True)
class TokenPlace:
    """Place of a token in a span."""

    row: int  # index in the pass
    position: int
    path: tuple[int, ...] | None  # slots of its drafted ancestors and itself, where these are no chain


def cut(feeds: Sequence[Feed], rows: int) -> list[list[Feed]]:
    """Returns the parts of the step's tokens in order; all but the last are full."""
    parts: list[list[Feed]] = []
    room = 0
    for feed in feeds:
        first = 0
        while first < len(feed.tokens):
            if not room:
                parts.append([])
                room = rows
            stop = min(first + room, len(feed.tokens))
            parts[-1].append(_part(feed, first, stop))
            room -= stop - first
            first = stop
    return parts


def _part(feed: Feed, first: int, stop: int) -> Feed:
    """Returns its tokens from ``first`` to ``stop``, and its Draft's nodes up to there."""
    count, nodes = len(feed.tokens), 0 if feed.tree is None else len(feed.tree) - (len(feed.tokens) - stop)
    return Feed(
        feed.tokens[first:stop],
        max(stop - max(first, count - feed.num_logits), 0),
        feed.start + first,
        feed.blocks,
        None if feed.tree is None or nodes <= 0 else feed.tree.leading(nodes),
    )


def paged_pass(
    feeds: Sequence[Feed],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    spare_slot: int,
    choice: ChoiceInput | None = None,
) -> PaddedPass:
    """Makes a pass for a kernel that reads the cache in place. Padding is written to ``spare_slot``."""
    fitting, rows = PagedLayout.of(feeds, block_size), ROWS[device.type]
    room = PagedLayout.padded(rows, fitting.blocks, as_chains=True)
    longest = max(max(feed.tree.depths) + 1 if feed.tree else 0 for feed in feeds)
    path_length = max(room.path_length, longest)
    layout = replace(room, lanes=len(feeds), path_length=path_length)
    fields = fill(layout, feeds, block_size, spare_slot, choice, device=device).sent()
    given = PagedInput.of(fields)
    return PaddedPass(
        given.token_ids,
        given.position_ids,
        given.slots,
        torch.arange(rows if fitting.logits else 0, device=device),
        [],
        block_size,
        dtype,
        given,
        None if choice is None else choice.at(fields),
        [],
        fitting.rows,
        given.logit_rows[: fitting.logits],
    )


def gathered_pass(
    feeds: Sequence[Feed], block_size: int, dtype: torch.dtype, device: torch.device, spare_slot: int
) -> PaddedPass:
    """Makes a pass for attention that gathers blocks. Padding is written to ``spare_slot``."""
    batch = pack(feeds, block_size, dtype, device)
    rows = ROWS[device.type]
    padding = rows - batch.num_tokens
    slots = batch.slots
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=device)
    return PaddedPass(
        pad(batch.token_ids, (0, padding)),
        pad(batch.position_ids, (0, padding)),
        pad(slots, (0, padding), value=spare_slot),
        torch.arange(rows if len(batch.logit_rows) else 0, device=device),
        batch.spans,
        block_size,
        dtype,
        None,
        None,
        [
            _group(span, tile, block_size, dtype, device)
            for span in batch.spans
            for tile in _tiles([*_places(span)])
        ],
        batch.num_tokens,
        batch.logit_rows,
    )


def _places(span: QuerySpan) -> Iterator[TokenPlace]:
    root = span.length - len(span.tree) if span.tree is not None else span.length
    for offset, position in enumerate(span.positions()):
        node = span.start + offset - root
        path = None
        if span.tree is not None and node >= 0 and span.tree.depths[node] != node:
            path = tuple(root + ancestor for ancestor in span.tree.path(node))
        yield TokenPlace(span.first + offset, position, path)


def _tiles(places: list[TokenPlace]) -> Iterator[list[TokenPlace]]:
    """Tokens that share a call of attention: neighbours within QUERIES positions, or one off the chain."""
    tile: list[TokenPlace] = []
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
    span: QuerySpan, tile: list[TokenPlace], block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionGroup:
    """Returns the tile as a group, whose shape follows from the tokens' positions alone."""
    rows = [place.row for place in tile]
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
    span: QuerySpan, place: TokenPlace, seen: int, length: int, block_size: int, device: torch.device
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


def _are_experts(path: str, module: Any) -> bool:
    """Whether a token chooses between the module's weights, by the names that transformers gives such."""
    return path.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__


def check_rows_are_apart(model: Any, name: str) -> None:
    """
    Raises:
        UnsupportedModelError: one token's result depends on others beyond attention, whatever the shape.
    """
    if (reason := why_rows_mix(model)) is not None:
        raise UnsupportedModelError(f"batch_invariant=True with model={name!r}: {reason}")


def why_rows_mix(model: Any) -> str | None:
    """Returns why a token's result depends on others beyond attention in any shape; None: it does not."""
    reasons = {MIXES_ROWS.get(type(module).__name__) for module in model.modules()} - {None}
    if any(_are_experts(path, module) for path, module in model.named_modules()):
        reasons.add("how many tokens an expert multiplies at once depends on the others")
    return "; ".join(sorted(map(str, reasons))) or None
