"""Coupled verification on the device: finds the accepted nodes of all Drafts in a single kernel launch.

The rule is ``verify_coupled`` in outrider/decoding/verify.py. For target drafters and rounds ahead, a second
kernel reads the Verdicts on the device too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.inputs import choice_input, told_tokens
from outrider.engine.inputs.choice_input import ChoiceInput, PackedRows
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.told_tokens import TOLD

PROGRAM_ROWS = 128  # rows of a program of ``find_path``

_ALTERNATIVE = tl.constexpr(told_tokens.ALTERNATIVE)
_POSITION = tl.constexpr(choice_input.INTEGERS.index("position"))


def read_verdicts(
    token_ids: Tensor, last_rows: Tensor, top_tokens: Tensor, are_accepted: Tensor, rows: PackedRows
) -> tuple[Tensor, Tensor]:
    """Writes the target's own tokens into a batch, and advances the next choices past each Verdict.

    Args:
        token_ids: int64 [num_rows] of the batch: for each sequence tokens, then at most FEW_QUERIES
            placeholders (outrider/engine/inputs/told_tokens.py), which the target's tokens replace.
        last_rows: int64 [num_sequences] last row of each sequence in the batch.
        top_tokens: int32 [rows, ranks].
        are_accepted: bool [rows] whether the token drafted there is accepted; [0]: nothing was drafted.
        rows: rows that choose the next tokens, at positions as if nothing was accepted; changed in place.

    Returns:
        int64 [num_sequences] rows of the batch with the last tokens of the Verdicts, and int32
        [num_sequences, len(TOLD)] numbers of TOLD.
    """
    ends, told = torch.empty_like(last_rows), top_tokens.new_empty(len(last_rows), len(TOLD))
    arguments, constants = _reading(token_ids, last_rows, top_tokens, are_accepted, rows, ends, told)
    follow_chains[(len(last_rows),)](*arguments, **constants)
    return ends, told


def compile_reading(device: torch.device) -> None:
    """Compiles the kernel of ``read_verdicts`` in advance, so that no Draft waits for it."""
    rows = ChoiceInput.without_choice([0]).copied(device)
    numbers, tokens = (torch.empty(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    flags = torch.empty(1, dtype=torch.bool, device=device)
    for are_accepted in (flags, flags[:0]):
        given = numbers, numbers, tokens[:, None], are_accepted, rows, numbers, tokens
        arguments, constants = _reading(*given)
        follow_chains.warmup(*arguments, grid=(1,), **constants)


def _reading(
    token_ids: Tensor,
    last_rows: Tensor,
    top_tokens: Tensor,
    are_accepted: Tensor,
    rows: PackedRows,
    ends: Tensor,
    told: Tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments and constants of ``follow_chains``."""
    flags = are_accepted if len(are_accepted) else None
    given = (token_ids, last_rows, top_tokens, top_tokens.shape[1], flags)
    return (*given, rows.integers, rows.integers.shape[1], ends, told), {
        "BLOCK": FEW_QUERIES,
        "TELLS": len(TOLD),
    }


@triton.jit(do_not_specialize=["ranks", "num_sequences"])
def follow_chains(
    token_ids,
    last_rows,
    top_tokens,
    ranks,
    are_accepted,
    integers,
    num_sequences,
    ends,
    told,
    BLOCK: tl.constexpr,
    TELLS: tl.constexpr,
):
    """Kernel of ``read_verdicts``, a program per sequence. are_accepted: None if nothing was drafted."""
    sequence = tl.program_id(0)
    first = tl.full((), 0, tl.int64)
    if sequence > 0:
        first = tl.load(last_rows + sequence - 1) + 1
    last_row = tl.load(last_rows + sequence)
    first = tl.maximum(first, last_row + 1 - BLOCK)  # placeholders come last, for example after a prompt
    rows = first + tl.arange(0, BLOCK)
    inside = rows <= last_row
    given = tl.load(token_ids + rows, mask=inside, other=0)
    is_told = inside & (given < 0)
    numbers = -1 - given
    chosen, alternatives = numbers % _ALTERNATIVE, tl.max(tl.where(is_told, numbers // _ALTERNATIVE, 0))
    tokens = tl.load(top_tokens + chosen * ranks, mask=is_told, other=0)
    root = tl.min(tl.where(is_told, rows, first + BLOCK))
    accepted, node = tl.full((), 0, tl.int32), tl.full((), -1, tl.int64)
    if are_accepted is not None:
        flags = tl.load(are_accepted + chosen, mask=is_told & (rows > root), other=0)
        accepted = tl.sum(flags.to(tl.int32))
        # An accepted alternative comes between the accepted nodes of the chain and the Verdict's last token.
        places = tl.arange(0, BLOCK)
        of_alternatives = tl.max(tl.where(is_told, chosen, 0)) + 1 + places
        flags = tl.load(are_accepted + of_alternatives, mask=places < alternatives, other=0)
        taken = tl.sum(flags.to(tl.int32))
        node = accepted.to(tl.int64) - 1
        accepted += taken
        last = tl.sum(tl.where(flags != 0, of_alternatives, 0))
        token = tl.load(top_tokens + last * ranks, mask=taken > 0, other=0)
        tokens = tl.where((rows == root + accepted) & (taken > 0), token, tokens)
        before = tl.min(tl.where(is_told, chosen, 2**62))  # row of the root
        node = tl.where(taken > 0, last - before - 1, node)
    tl.store(token_ids + rows, tokens.to(tl.int64), mask=is_told)
    tl.store(ends + sequence, root + accepted)
    tl.store(told + TELLS * sequence, tl.sum(tl.where(rows == root + accepted, tokens, 0)))
    tl.store(told + TELLS * sequence + 1, accepted)
    tl.store(told + TELLS * sequence + 2, node.to(tl.int32))
    at = integers + _POSITION * num_sequences + sequence
    tl.store(at, tl.load(at) + accepted)


@triton.jit(do_not_specialize=["ranks", "num_rows", "depth"])
def find_path(top_tokens, ranks, drafts, num_rows, depth, are_accepted, BLOCK: tl.constexpr):
    """Finds accepted rows: from the root to the row, the target chose the drafted token of every node.

    drafts: DraftRows.numbers, see outrider/engine/inputs/choice_input.py.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    node, holds = rows.to(tl.int64), inside
    for _ in range(depth):
        parent = tl.load(drafts + node, mask=inside, other=-1)
        is_node = inside & (parent >= 0)
        token = tl.load(drafts + num_rows + node, mask=is_node, other=0)
        chosen = tl.load(top_tokens + parent * ranks, mask=is_node, other=0)
        holds = holds & ((token == chosen) | (parent < 0))
        node = tl.where(is_node, parent, node)
    tl.store(are_accepted + rows, holds, mask=inside)
