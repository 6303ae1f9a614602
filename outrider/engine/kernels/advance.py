"""Drafting on the device: kernels that feed the tokens chosen at a position into the next position.

The host takes no part. A position feeds a token of each sequence, and the row of a sequence in the batch is
its number in the step. Rows beyond the sequences are padding.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.inputs import choice_input, context_parts, paged_input
from outrider.engine.inputs.choice_input import PackedRows
from outrider.engine.inputs.paged_input import NO_ROOT, TILE_FIELDS, PagedInput
from outrider.engine.kernels.choice import DeviceChoice

LANES = 512  # sequences that a program reads; graphs of all sizes up to this share a compiled kernel

_SPLIT_TILES, _SHORTEST = tl.constexpr(paged_input.SPLIT_TILES), tl.constexpr(context_parts.SHORTEST)
# Indices of a tile's fields, and of the numbers of PagedInput.work.
_LANE, _ROW, _COUNT, _END, _ROOT = (tl.constexpr(place) for place in range(TILE_FIELDS))
_WORK = tuple(tl.constexpr(place) for place in range(len(paged_input.WORK)))
_FEW, _SPLIT, _LONGEST, _ROWS, _NEW_BLOCKS = _WORK
# Number of a row's integers, and indices of two of them.
_INTEGERS = tl.constexpr(len(choice_input.INTEGERS))
_POSITION, _POSITIONS = (
    tl.constexpr(choice_input.INTEGERS.index(name)) for name in ("position", "positions")
)
_AT_ONCE = tl.constexpr(128)  # rows that a program reads at a time
_INFINITY = tl.constexpr(math.inf)


@dataclass(frozen=True)
class ChainMemory:
    """Device memory of Drafts in progress: input of the next position, and tokens of earlier positions."""

    paged: PagedInput[Tensor]  # a row and a tile of a single row for each sequence
    rows: PackedRows
    progress: Tensor  # int64 [2, num_rows] number of positions whose tokens are known, and tile of each row
    # int32 [positions, num_rows, ranks + 1]: the best tokens, and whether the row's numbers are finite
    found: Tensor

    @property
    def num_rows(self) -> int:
        """Number of sequences for which there is room."""
        return self.progress.shape[1]


def begin(
    first: PagedInput[Tensor],
    rows: PackedRows,
    are_finite: Tensor,
    choice: DeviceChoice,
    memory: ChainMemory,
    block_size: int,
    spare_slot: int,
) -> None:
    """Stores the tokens of the first position, and prepares the input of the second position.

    Args:
        first: input of the first position: any number of tokens of each sequence, after the last of which a
            token is chosen.
        rows: rows that choose tokens, a row per sequence; sequences have blocks for all further positions.
        are_finite: bool [num_tokens] whether the keys and values of each fed token are finite.
        spare_slot: slot of no sequence, to which padding is written.
    """
    chosen = are_finite, choice.top_tokens, choice.are_valid
    arguments, constants = _beginning(first, rows, chosen, memory, block_size, spare_slot)
    begin_chains[(memory.num_rows,)](*arguments, **constants)


def compile_begin(memory: ChainMemory, block_size: int, spare_slot: int) -> None:
    """Compiles the kernel of ``begin`` in advance, so that no Draft waits for it."""
    flags = torch.empty_like(memory.progress[0], dtype=torch.bool)
    chosen = flags, torch.empty_like(memory.found[0, :, 1:]), flags
    arguments, constants = _beginning(memory.paged, memory.rows, chosen, memory, block_size, spare_slot)
    begin_chains.warmup(*arguments, grid=(memory.num_rows,), **constants)


def _beginning(
    first: PagedInput[Tensor],
    rows: PackedRows,
    chosen: tuple[Tensor, Tensor, Tensor],
    memory: ChainMemory,
    block_size: int,
    spare_slot: int,
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Returns arguments and constants of ``begin_chains``. chosen: are_finite, top_tokens and are_valid."""
    paged = memory.paged
    arguments = (
        *(first.logit_rows, first.seen, first.lanes, rows.integers, rows.numbers, *chosen),
        *(rows.integers.shape[1], chosen[1].stride(0), *_fed(paged)),
        *(memory.rows.integers, memory.rows.numbers, memory.progress, memory.found, memory.num_rows),
    )
    constants = {
        "BLOCK": block_size,
        "BLOCKS": paged.block_tables.shape[1],
        "RANKS": memory.found.shape[2] - 1,
        "FIELDS": TILE_FIELDS,
        "SPARE_SLOT": spare_slot,
        "NO_ROOT": NO_ROOT,
        "LANES": max(LANES, triton.next_power_of_2(memory.num_rows)),
    }
    return arguments, constants


def advance(
    choice: DeviceChoice, are_finite: Tensor, memory: ChainMemory, block_size: int, spare_slot: int
) -> None:
    """Stores the tokens of a position, and prepares the input of the next position.

    Args:
        are_finite: bool [num_rows].
        spare_slot: argument of ``begin``.
    """
    advance_chains[(memory.num_rows,)](
        choice.top_tokens,
        choice.are_valid,
        are_finite,
        *_fed(memory.paged),
        memory.rows.integers,
        memory.progress,
        memory.found,
        memory.num_rows,
        BLOCK=block_size,
        BLOCKS=memory.paged.block_tables.shape[1],
        RANKS=memory.found.shape[2] - 1,
        FIELDS=TILE_FIELDS,
        SPARE_SLOT=spare_slot,
    )


def _fed(paged: PagedInput[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors that change with each position, and the block tables."""
    rows = (paged.token_ids, paged.position_ids, paged.slots, paged.seen)
    return *rows, paged.work, paged.few_tiles, paged.block_tables


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "stride"])
def begin_chains(
    # Input and choice of the first position, which feeds any number of tokens of each sequence.
    logit_rows,  # int64 [num_sequences] last row of each sequence
    seen,  # int64 [rows] number of slots up to each row's own
    sequence_lanes,  # int64 [num_sequences] rows of the block tables
    integers,  # int64 [5, num_sequences] PackedRows.integers
    numbers,  # float64 [3, num_sequences] PackedRows.numbers
    are_finite,  # bool [rows]
    top_tokens,  # int32 [num_sequences, RANKS], whose rows are ``stride`` numbers apart
    are_valid,  # bool [num_sequences]
    num_sequences,
    stride,
    # Input of the further positions; see advance_chains.
    token_ids,
    position_ids,
    slots,
    next_seen,
    work,
    tiles,
    block_tables,
    next_integers,
    next_numbers,
    progress,
    found,
    num_rows,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    FIELDS: tl.constexpr,
    SPARE_SLOT: tl.constexpr,
    NO_ROOT: tl.constexpr,
    LANES: tl.constexpr,  # at least num_rows, a power of two
):
    """Kernel of ``begin``, with a program for each row."""
    row = tl.program_id(0)
    # Split tiles, whose context several programs share, come first: see engine/inputs/paged_input.py.
    lanes = tl.arange(0, LANES)
    inside = lanes < num_sequences
    every_last = tl.load(logit_rows + lanes, mask=inside, other=0)
    every_end = tl.where(inside, tl.load(seen + every_last, mask=inside, other=0) + 1, 0)
    are_split = (every_end > _SHORTEST) & (every_end * _SPLIT_TILES > tl.sum(every_end))
    num_split = tl.sum(are_split.to(tl.int32))
    before = lanes < row
    place_of_tile = num_split + tl.sum((inside & ~are_split & before).to(tl.int32))
    if tl.sum((are_split & (lanes == row)).to(tl.int32)) > 0:
        place_of_tile = tl.sum((are_split & before).to(tl.int32))
    is_real = row < num_sequences
    place_of_tile = tl.where(is_real, place_of_tile, row)
    if row == 0:
        tl.store(work + _FEW, num_sequences)
        tl.store(work + _SPLIT, num_split)
        tl.store(work + _LONGEST, tl.max(tl.where(are_split, every_end, 0)))
        tl.store(work + _ROWS, num_sequences)
        tl.store(work + _NEW_BLOCKS, 0)
    tile = tiles + place_of_tile * FIELDS
    lane = tl.load(sequence_lanes + row, mask=is_real, other=0)
    tl.store(tile + _LANE, lane)
    tl.store(tile + _ROW, row)
    tl.store(tile + _COUNT, is_real.to(tl.int32))
    tl.store(tile + _END, 0)
    tl.store(tile + _ROOT, NO_ROOT)
    tl.store(progress + row, 1)
    tl.store(progress + num_rows + row, place_of_tile)
    if is_real:
        last, first = tl.load(logit_rows + row), tl.full((), 0, tl.int64)
        if row > 0:
            first = tl.load(logit_rows + row - 1) + 1
        is_valid = tl.load(are_valid + row).to(tl.int32)
        for start in range(first, last + 1, _AT_ONCE):
            rows = start + tl.arange(0, _AT_ONCE)
            finite = tl.load(are_finite + rows, mask=rows <= last, other=True).to(tl.int32)
            is_valid = tl.minimum(is_valid, tl.min(finite))
        place = tl.load(seen + last)
        positions = tl.load(integers + _POSITIONS * num_sequences + row)
        for field in tl.static_range(_INTEGERS):
            number = tl.load(integers + field * num_sequences + row)
            if field == _POSITION:
                number += 1
            tl.store(next_integers + field * num_rows + row, number)
        for field in tl.static_range(3):
            setting = tl.load(numbers + field * num_sequences + row)
            tl.store(next_numbers + field * num_rows + row, setting)
        best = top_tokens + row * stride
        _tell(row, 0, best, is_valid, found, num_rows, RANKS)
        token, held = tl.load(best), block_tables + lane * BLOCKS
        fields = (token_ids, position_ids, slots, next_seen, tile)
        _feed(row, token, place, fields, held, BLOCKS, BLOCK)
        if positions <= 1:
            _stop(row, place, fields, SPARE_SLOT)
    else:
        for field in tl.static_range(_INTEGERS):
            tl.store(next_integers + field * num_rows + row, 0)
        tl.store(next_numbers + row, 1.0)  # temperature
        tl.store(next_numbers + num_rows + row, 1.0)  # top_p
        tl.store(next_numbers + 2 * num_rows + row, -_INFINITY)  # logarithm of min_p
        tl.store(token_ids + row, 0)
        tl.store(position_ids + row, 0)
        tl.store(slots + row, SPARE_SLOT)
        tl.store(next_seen + row, 0)


@triton.jit(do_not_specialize=["num_rows"])
def advance_chains(
    top_tokens,  # int32 [num_rows, RANKS] best tokens after each row
    are_valid,  # bool [num_rows]
    are_finite,  # bool [num_rows]
    token_ids,  # int64 [num_rows]
    position_ids,  # int64 [num_rows]
    slots,  # int64 [num_rows]
    seen,  # int64 [num_rows] number of slots up to each row's own; 0: padding
    work,  # int64 [5]
    tiles,  # int64 [num_rows, FIELDS]
    block_tables,  # int32 [sequences, BLOCKS]
    integers,  # int64 [5, num_rows] PackedRows.integers
    progress,  # int64 [2, num_rows] ChainMemory.progress
    found,  # int32 [positions, num_rows, RANKS + 1] ChainMemory.found
    num_rows,
    BLOCK: tl.constexpr,  # slots of a cache block
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    FIELDS: tl.constexpr,
    SPARE_SLOT: tl.constexpr,
):
    """Kernel of ``advance``, with a program for each row; the next position feeds the best tokens.

    A sequence that has all its positions feeds its last token again. It writes to the spare slot, and the
    tokens chosen for it are not stored.
    """
    row = tl.program_id(0)
    if row == 0:
        longest = tl.load(work + _LONGEST)
        tl.store(work + _LONGEST, longest + (longest > 0).to(tl.int64))
    place, position = tl.load(seen + row), tl.load(progress + row)
    positions = tl.load(integers + _POSITIONS * num_rows + row)
    if position < positions:
        at = integers + _POSITION * num_rows + row
        is_valid = tl.load(are_valid + row).to(tl.int32) & tl.load(are_finite + row).to(tl.int32)
        _tell(row, position, top_tokens + row * RANKS, is_valid, found, num_rows, RANKS)
        tl.store(progress + row, position + 1)
        tl.store(at, tl.load(at) + 1)
        tile = tiles + tl.load(progress + num_rows + row) * FIELDS
        token, held = tl.load(top_tokens + row * RANKS), block_tables + tl.load(tile + _LANE) * BLOCKS
        fields = (token_ids, position_ids, slots, seen, tile)
        _feed(row, token, place, fields, held, BLOCKS, BLOCK)
        if position + 1 >= positions:
            _stop(row, place, fields, SPARE_SLOT)


@triton.jit
def _tell(row, position, best, is_valid, found, num_rows, RANKS: tl.constexpr):
    """Stores the best tokens of a row at a position, and whether the row's numbers are finite."""
    at = found + (position * num_rows + row) * (RANKS + 1)
    for rank in tl.static_range(RANKS):
        tl.store(at + rank, tl.load(best + rank))
    tl.store(at + RANKS, is_valid)


@triton.jit
def _feed(row, token, place, fields, held, num_blocks, BLOCK: tl.constexpr):
    """Makes a row feed a token at a place (slot number) of its sequence. held: blocks of the sequence."""
    token_ids, position_ids, slots, seen, tile = fields
    index = place // BLOCK
    # The token after the last position is never fed, and may have no block.
    block = tl.load(held + index, mask=index < num_blocks, other=0).to(tl.int64)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(position_ids + row, place)
    tl.store(slots + row, block * BLOCK + place % BLOCK)
    tl.store(seen + row, place + 1)
    tl.store(tile + _END, place + 1)


@triton.jit
def _stop(row, place, fields, SPARE_SLOT: tl.constexpr):
    """Makes a row read the slots before ``place``, and write to the spare slot."""
    _, position_ids, slots, seen, tile = fields
    tl.store(position_ids + row, place - 1)
    tl.store(slots + row, SPARE_SLOT)
    tl.store(seen + row, place)
    tl.store(tile + _END, place)
