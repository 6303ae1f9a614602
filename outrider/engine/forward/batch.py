"""Work of a step packed into a forward pass: concatenated tokens of many sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from msgspec import Struct

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import Draft
from outrider.engine.forward.attention_groups import AttentionGroup, QuerySpan, as_rows, form_groups
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.choice_input import PackedRows
from outrider.engine.inputs.paged_input import PagedInput
from outrider.engine.inputs.recurrence import Recurrence
from outrider.engine.inputs.state_program import StateProgram
from outrider.engine.inputs.step_input import NO_ROUNDS, Feed, ForeseenRounds, Rows
from outrider.engine.sequence import EngineSequence
from outrider.engine.step_timings import Path


@dataclass(frozen=True)
class AdapterTiles:
    """Rows of a pass that have adapters, as fields of PagedInput."""

    rows: torch.Tensor
    tiles: torch.Tensor


# Numbers of adapters, and the indices of their rows in a pass, int64 [num_rows]; None: all rows. On a GPU
# with our kernels the device reads them instead.
AdapterRows = Sequence[tuple[int, torch.Tensor | None]] | AdapterTiles


class Item(Struct, frozen=True, eq=False):
    """Tokens that a sequence feeds in a step: committed tokens first, then nodes of a Draft."""

    sequence: EngineSequence
    tokens: list[int]
    num_committed: int
    num_logits: int  # wanted rows of logits, for the last tokens
    tree: Draft | None  # pending and fed nodes, if they branch; None: each token sees all tokens before it

    def feed(self) -> Feed:
        """Returns the Feed for the forward pass. The sequence must hold blocks for all fed tokens."""
        sequence = self.sequence
        start, blocks = sequence.cached + len(sequence.pending.tokens), sequence.blocks
        adapter, committed = sequence.adapter.number, sequence.cached + self.num_committed
        tokens, count = self.tokens, self.num_logits
        return Feed(tokens, count, start, blocks, self.tree, adapter, sequence.state, committed)


@dataclass(frozen=True)
class Batch:
    """Packed tensors of a forward pass."""

    token_ids: torch.Tensor  # int64 [1, num_tokens]
    position_ids: torch.Tensor  # int64 [1, num_tokens]
    slots: Rows  # [num_tokens] slots of the tokens' keys and values
    logit_rows: torch.Tensor  # int64 [num_logits]
    spans: list[QuerySpan]
    block_size: int
    dtype: torch.dtype  # type of queries and masks
    paged: PagedInput[torch.Tensor] | None  # input of an attention kernel; None: blocks are gathered
    choice: PackedRows | None  # rows that choose tokens, valid after the pass; None: not in the buffer
    adapters: AdapterRows = field(default=(), kw_only=True)  # rows of sequences that have adapters
    # Order in which recurrent layers compute the tokens of each sequence; empty without such layers.
    recurrences: Sequence[Recurrence] = field(default=(), kw_only=True)
    rounds: ForeseenRounds = field(default=NO_ROUNDS, kw_only=True)
    state_program: StateProgram | None = field(default=None, kw_only=True)  # ``recurrences`` for a GPU kernel

    @property
    def path(self) -> Path:
        """Returns how the pass is computed."""
        return "gathered" if self.paged is None else "kernels"

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    def choosing_at(self, rows: torch.Tensor) -> "Batch":
        """Returns the batch with other rows that choose tokens: int64 [num_sequences]."""
        assert self.paged is not None
        return replace(self, logit_rows=rows, paged=replace(self.paged, logit_rows=rows))

    def without_padding(self, output: ForwardOutput) -> ForwardOutput:
        """Returns the output of its pass without rows of padding."""
        return output

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """Groups for attention without a kernel, formed at the first use."""
        return form_groups(self.spans, self.block_size, self.dtype, self.token_ids.device)


def feed_chosen(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replaces the tokens of a batch by tokens that only the device knows.

    Args:
        token_ids: [1, num_tokens] of the batch; before this call, indices into ``chosen``.
        chosen: [num_rows] tokens chosen by the preceding step.
    """
    token_ids.copy_(chosen[token_ids])


def adapter_rows(feeds: Sequence[Feed], device: torch.device) -> AdapterRows:
    """Returns the rows of each adapter in a pass of these feeds; empty without adapters."""
    of_feeds = [feed.adapter for feed in feeds]
    numbers = sorted({*of_feeds} - {0})
    if not numbers:
        return ()
    of_rows = np.repeat(of_feeds, [len(feed.tokens) for feed in feeds])
    if (of_rows == numbers[0]).all():
        return ((numbers[0], None),)
    places = [torch.from_numpy(np.flatnonzero(of_rows == number)) for number in numbers]
    return [(number, to_device(of_one, device)) for number, of_one in zip(numbers, places, strict=True)]


def pack(feeds: Sequence[Feed], tables: BlockTables, dtype: torch.dtype) -> Batch:
    """Packs the feeds one after the other into a batch, for attention that gathers blocks."""
    block_size, device = tables.block_size, tables.device
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans = []
    for feed in feeds:
        blocks = tables.on_host[feed.row]
        span = QuerySpan(blocks, len(tokens), len(feed.tokens), feed.start, feed.tree, feed.looks_ahead)
        tokens += feed.tokens
        positions += span.positions()
        slots += _slots(span, block_size)
        logit_rows += range(len(tokens) - feed.num_logits, len(tokens))
        spans.append(span)
    return Batch(
        torch.tensor([tokens], device=device),
        torch.tensor([positions], device=device),
        as_rows(slots, device),
        torch.tensor(logit_rows, dtype=torch.int64, device=device),
        spans,
        block_size,
        dtype,
        None,
        None,
    )


def paged_batch(
    given: PagedInput[torch.Tensor],
    logit_rows: torch.Tensor,
    block_size: int,
    dtype: torch.dtype,
    choice: PackedRows | None = None,
) -> Batch:
    """Makes a batch for a kernel that reads the cache in place.

    Args:
        given: the step's input on the device.
        logit_rows: int64 [num_logits].
        choice: rows that choose tokens, in the step's buffer; None: there are no such rows.
    """
    has_adapters = len(given.adapter_tiles) > 0
    return Batch(
        given.token_ids,
        given.position_ids,
        given.slots,
        logit_rows,
        [],
        block_size,
        dtype,
        given,
        choice,
        adapters=AdapterTiles(given.adapter_rows, given.adapter_tiles) if has_adapters else (),
    )


def _slots(span: QuerySpan, block_size: int) -> list[int]:
    if span.count == 1:
        return [int(span.blocks[span.start // block_size]) * block_size + span.start % block_size]
    places = np.arange(span.start, span.length)
    slots: list[int] = (span.blocks[places // block_size] * block_size + places % block_size).tolist()
    return slots
