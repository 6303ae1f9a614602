"""Completes the input of rounds that the device begins before the host knows the preceding Verdicts.

Rank 0 prepares these rounds as if nothing was accepted. The kernel then advances all rows of a sequence by
the number of accepted tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.inputs import choice_input, paged_input
from outrider.engine.inputs.choice_input import ChoiceInput, PackedRows
from outrider.engine.inputs.paged_input import FEW_QUERIES, NO_ROOT, TILE_FIELDS, PagedInput
from outrider.engine.inputs.told_tokens import TOLD

# Indices of a tile's fields, of the numbers of PagedInput.work, and of the numbers of TOLD.
_LANE, _ROW, _COUNT, _END, _ROOT = (tl.constexpr(place) for place in range(TILE_FIELDS))
_FEW, _SPLIT, _LONGEST, _, _ = (tl.constexpr(place) for place in range(len(paged_input.WORK)))
_ACCEPTED, _NODE = (tl.constexpr(TOLD.index(name)) for name in ("accepted", "node"))
_POSITION = tl.constexpr(choice_input.INTEGERS.index("position"))
_AT_ONCE = tl.constexpr(128)  # tiles that a program reads at a time
_NO_ROW = tl.constexpr(2**30)  # above every row


def move_behind_verdicts(
    paged: PagedInput[Tensor], choice: PackedRows | None, told: Tensor, block_size: int
) -> Tensor:
    """Advances the rows of the leading sequences, and their choices of tokens, by the accepted tokens.

    Args:
        paged: input with at most FEW_QUERIES rows for each of these sequences, all with logits: the last
            token of the Verdict, and a Draft. The block tables have blocks for any number of accepted tokens.
        choice: rows that choose tokens, completed by these Drafts' tokens; None at ranks other than 0.
        told: int32 [num_sequences * len(TOLD)] numbers that ``read_verdicts`` returned.

    Returns:
        int64 [2, num_sequences] the slot that holds the last accepted node of each Draft, and the slot to
        which it has to move. They differ if the node is off the Draft's chain.
    """
    moves = torch.empty(2, len(told) // len(TOLD), dtype=torch.int64, device=told.device)
    arguments, constants = _moving(paged, choice, told, moves, block_size)
    move_rounds[(moves.shape[1],)](*arguments, **constants)
    return moves


def compile_moving(block_tables: Tensor, block_size: int, *, chooses: bool) -> None:
    """Compiles the kernel of ``move_behind_verdicts`` in advance, so that no round waits for it.

    chooses: whether this rank chooses tokens, as only rank 0 does.
    """
    device = block_tables.device
    numbers = torch.empty(1, TILE_FIELDS, dtype=torch.int64, device=device)
    flat, told = numbers[0], torch.empty(len(TOLD), dtype=torch.int32, device=device)
    fields = dict.fromkeys(("token_ids", "position_ids", "few_tiles", "many_tiles", "adapter_tiles"), numbers)
    of_rows = ("slots", "seen", "ancestors", "paths", "logit_rows", "work", "lanes", "adapter_rows")
    fields |= dict.fromkeys(of_rows, flat)
    paged = PagedInput.of({**fields, "new_blocks": told}, block_tables)
    choice = ChoiceInput.without_choice([0]).copied(device) if chooses else None
    arguments, constants = _moving(paged, choice, told, numbers, block_size)
    move_rounds.warmup(*arguments, grid=(1,), **constants)


def _moving(
    paged: PagedInput[Tensor], choice: PackedRows | None, told: Tensor, moves: Tensor, block_size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments and constants of ``move_rounds``."""
    rows = paged.token_ids, paged.position_ids, paged.slots, paged.seen
    of_choice = (
        (None, None, 0) if choice is None else (choice.integers, choice.drafts, choice.drafts.shape[1])
    )
    constants = {"BLOCK": block_size, "FIELDS": TILE_FIELDS, "TELLS": len(TOLD), "ROWS": FEW_QUERIES}
    constants |= {"NO_ROOT": NO_ROOT, "BLOCKS": paged.block_tables.shape[1]}
    constants["num_warps"] = 1  # several warps would race, as the kernel overwrites numbers that it has read
    given = (told, paged.lanes, paged.few_tiles, paged.work, *rows, paged.block_tables, *of_choice)
    return (*given, moves, moves.shape[1]), constants


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def move_rounds(
    told,  # int32 [num_sequences, TELLS]
    lanes,  # int64 [sequences] rows of the block tables
    tiles,  # int64 [tiles, FIELDS]
    work,  # int64 [5]
    token_ids,  # int64 [rows]
    position_ids,  # int64 [rows]
    slots,  # int64 [rows]
    seen,  # int64 [rows]
    block_tables,  # int32 [sequences, BLOCKS]
    integers,  # int64 [5, num_rows] PackedRows.integers; None: this rank chooses no tokens
    drafts,  # int64 [2, num_rows] PackedRows.drafts
    num_rows,
    moves,  # int64 [2, num_sequences]
    num_sequences,
    BLOCK: tl.constexpr,  # slots of a cache block
    BLOCKS: tl.constexpr,
    FIELDS: tl.constexpr,
    TELLS: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a sequence, at most
    NO_ROOT: tl.constexpr,
):
    """Kernel of ``move_behind_verdicts``, with a program for each sequence."""
    sequence = tl.program_id(0)
    lane = tl.load(lanes + sequence)
    accepted = tl.load(told + sequence * TELLS + _ACCEPTED).to(tl.int64)
    node = tl.load(told + sequence * TELLS + _NODE).to(tl.int64)
    num_tiles, num_split = tl.load(work + _FEW), tl.load(work + _SPLIT)
    first, count = tl.full((), _NO_ROW, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, num_tiles, _AT_ONCE):
        numbers = start + tl.arange(0, _AT_ONCE)
        tile = tiles + numbers * FIELDS
        is_own = tl.load(tile + _LANE, mask=numbers < num_tiles, other=-1) == lane
        first = tl.minimum(first, tl.min(tl.load(tile + _ROW, mask=is_own, other=_NO_ROW)))
        count += tl.sum(tl.load(tile + _COUNT, mask=is_own, other=0))
        end = tl.load(tile + _END, mask=is_own, other=0) + accepted
        root = tl.load(tile + _ROOT, mask=is_own, other=NO_ROOT)
        tl.store(tile + _END, end, mask=is_own)
        tl.store(tile + _ROOT, root + accepted, mask=is_own & (root != NO_ROOT))
        tl.atomic_max(work + _LONGEST, tl.max(tl.where(is_own & (numbers < num_split), end, 0)))
    rows = first + tl.arange(0, ROWS)
    inside = rows < first + count
    root_place, held = tl.load(position_ids + first), block_tables + lane * BLOCKS
    places = root_place + accepted + tl.arange(0, ROWS)
    blocks = tl.load(held + places // BLOCK, mask=inside, other=0).to(tl.int64)
    tl.store(slots + rows, blocks * BLOCK + places % BLOCK, mask=inside)
    # All threads read the root's position above as its place, so positions are written only afterwards.
    positions = tl.load(position_ids + rows, mask=inside, other=0)
    visible = tl.load(seen + rows, mask=inside, other=0)
    tl.store(position_ids + rows, positions + accepted, mask=inside)
    tl.store(seen + rows, visible + accepted, mask=inside)
    source, target = root_place + node, root_place + accepted - 1
    source_block = tl.load(held + source // BLOCK).to(tl.int64)
    target_block = tl.load(held + target // BLOCK).to(tl.int64)
    tl.store(moves + sequence, source_block * BLOCK + source % BLOCK)
    tl.store(moves + num_sequences + sequence, target_block * BLOCK + target % BLOCK)
    if integers is not None:
        at = integers + _POSITION * num_rows + rows
        tl.store(at, tl.load(at, mask=inside, other=0) + accepted, mask=inside)
        tl.store(drafts + num_rows + rows, tl.load(token_ids + rows, mask=inside, other=0), mask=inside)
