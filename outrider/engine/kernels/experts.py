"""Mixture of experts on a GPU, as five launches of Triton kernels: choose, sort, multiply twice, add up.

No launch waits for the host, and the grids depend on the number of rows alone, so a CUDA graph can capture
them. A program of a product computes some rows of one expert; programs without rows end at once. Sums of a
row are added in a fixed order, by instructions that do not depend on the other rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.stored_product import (
    ProductTiling,
    constants,
    parts_of,
    product_of_tile,
)
from outrider.engine.kernels.stored_weight import StoredWeight

PAIRS_AT_ONCE = 1024  # pairs of a row and a slot that a program of ``_sort`` reads at a time
NUMBERS_AT_ONCE = 1024  # numbers that a program of ``_add_up`` adds, at most
# MANY has half the rows of the last of TILINGS: gate and up are two sums, which take twice the registers.
FEW, MANY = ProductTiling(64, 16, 4, 6), ProductTiling(128, 32, 8, 3)


@triton.jit
def _route(
    logits,  # float32 [num_rows, EXPERTS]
    correction,  # float32 [EXPERTS], or None
    chosen,  # int64 [num_rows, SLOTS]
    weights,  # float32 [num_rows, SLOTS]
    scaling,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two
    SLOTS: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,  # a power of two
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,  # groups whose experts may be chosen
    GROUP_WIDTH: tl.constexpr,  # a power of two
    SCORES: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of, slots = tl.arange(0, WIDTH), tl.arange(0, SLOT_WIDTH)
    is_expert = of < EXPERTS
    logit = tl.load(logits + row * EXPERTS + of, mask=is_expert, other=float("-inf"))
    if SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORES == "softmax":
        powers = tl.exp(logit - tl.max(logit, 0))
        scores = powers / tl.sum(powers, 0)
    else:
        scores = logit
    ranked = tl.where(is_expert, scores, float("-inf"))
    if correction is not None:
        ranked += tl.load(correction + of, mask=is_expert, other=0.0)
    if KEPT < GROUPS:
        group_of, groups = of // (EXPERTS // GROUPS), tl.arange(0, GROUP_WIDTH)
        best = tl.full((GROUP_WIDTH,), float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            own = tl.where(group_of == group, ranked, float("-inf"))
            first = tl.max(own, 0)
            at = tl.min(tl.where(own == first, of, WIDTH), 0)
            best = tl.where(groups == group, first + tl.max(tl.where(of == at, float("-inf"), own), 0), best)
        counts = tl.zeros((WIDTH,), tl.int1)
        for _ in tl.static_range(KEPT):
            at = tl.min(tl.where(best == tl.max(best, 0), groups, GROUP_WIDTH), 0)
            counts |= group_of == at
            best = tl.where(groups == at, float("-inf"), best)
        ranked = tl.where(counts, ranked, float("-inf"))
    found = tl.zeros((SLOT_WIDTH,), tl.int64)
    weight = tl.full((SLOT_WIDTH,), float("-inf") if SCORES == "softmax of chosen" else 0.0, tl.float32)
    for slot in tl.static_range(SLOTS):
        at = tl.min(tl.where(ranked == tl.max(ranked, 0), of, WIDTH), 0)
        found = tl.where(slots == slot, at, found)
        weight = tl.where(slots == slot, tl.sum(tl.where(of == at, scores, 0.0), 0), weight)
        ranked = tl.where(of == at, float("-inf"), ranked)
    if SCORES == "softmax of chosen":
        weight = tl.exp(weight - tl.max(weight, 0))
    if SCORES == "softmax of chosen" or NORMALIZED:
        weight /= tl.sum(weight, 0)
    place = row * SLOTS + slots
    tl.store(chosen + place, found, mask=slots < SLOTS)
    tl.store(weights + place, weight * scaling, mask=slots < SLOTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(
    chosen,  # int64 [num_pairs]
    pairs,  # int32 [num_pairs]: pairs of a row and a slot, stably sorted by expert
    begin,  # int32 [EXPERTS + 1]: index in ``pairs`` of the first pair of each expert
    read,  # int32 [1] counter of the experts that have pairs, or None
    num_pairs,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    expert, of = tl.program_id(0), tl.arange(0, WIDTH)
    before = 0
    for start in range(0, num_pairs, WIDTH):
        number = tl.load(chosen + start + of, mask=start + of < num_pairs, other=EXPERTS)
        before += tl.sum((number < expert).to(tl.int32), 0)
    first = before
    tl.store(begin + expert, first)
    tl.store(begin + EXPERTS, num_pairs)
    for start in range(0, num_pairs, WIDTH):
        is_own = tl.load(chosen + start + of, mask=start + of < num_pairs, other=EXPERTS) == expert
        own = is_own.to(tl.int32)
        tl.store(pairs + before + tl.cumsum(own, 0) - 1, start + of, mask=is_own)
        before += tl.sum(own, 0)
    if read is not None:
        tl.atomic_add(read, 1, mask=before > first)


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_chosen(
    rows,  # [num_pairs // SLOTS, INPUTS]
    pairs,  # output of _sort
    begin,  # output of _sort
    codes,
    scales,
    zeros,
    factors,
    bias,
    output,  # [num_pairs, OUTPUTS]
    num_pairs,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # number of experts, rounded up to a power of two
    SLOTS: tl.constexpr,  # pairs that share a row
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    SHARED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,  # whether an expert has OUTPUTS gates, followed by OUTPUTS ups
    SLOPE: tl.constexpr,  # slope of the gate's sigmoid; None: the gate is silu
    LIMIT: tl.constexpr,  # clamp limit of gate and up; None: the gate is silu
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    experts = tl.arange(0, WIDTH)
    first = tl.load(begin + experts, mask=experts < EXPERTS, other=num_pairs)
    last = tl.load(begin + experts + 1, mask=experts < EXPERTS, other=num_pairs)
    tiles = (last - first + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    is_own = experts == expert
    start = tl.sum(tl.where(is_own, first + (tile - ends + tiles) * ROWS, 0), 0)
    line = start + tl.arange(0, ROWS)
    is_row = line < tl.sum(tl.where(is_own, last, 0), 0)
    pair = tl.load(pairs + line, mask=is_row, other=0).to(tl.int64)
    own_rows = rows + (pair // SLOTS)[None, :] * INPUTS + tl.arange(0, SPAN)[:, None]
    output_of = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_output = output_of < OUTPUTS
    at = expert.to(tl.int64) * (OUTPUTS * 2 if GATED else OUTPUTS) + output_of
    total = product_of_tile(
        own_rows,
        is_row,
        at,
        is_output,
        codes,
        scales,
        zeros,
        factors,
        bias,
        INPUTS,
        GROUP,
        SPAN,
        SPANS,
        SHARED,
        KIND,
        TILE,
        ROWS,
    )
    if GATED:
        up = product_of_tile(
            own_rows,
            is_row,
            at + OUTPUTS,
            is_output,
            codes,
            scales,
            zeros,
            factors,
            bias,
            INPUTS,
            GROUP,
            SPAN,
            SPANS,
            SHARED,
            KIND,
            TILE,
            ROWS,
        )
        if LIMIT is not None:
            total = tl.minimum(total, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            total = total / (1.0 + tl.exp(-SLOPE * total)) * up
        else:
            total = total / (1.0 + tl.exp(-total)) * up
    place = pair[None, :] * OUTPUTS + output_of[:, None]
    inside = is_output[:, None] & is_row[None, :]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _add_up(
    products,  # [num_rows, SLOTS, SIZE]
    weights,  # float32 [num_rows, SLOTS]
    added,  # [num_rows, SIZE], or None
    output,  # [num_rows, SIZE]
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # numbers of a program
):
    row = tl.program_id(0).to(tl.int64)
    of = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = of < SIZE
    total = tl.zeros((WIDTH,), tl.float32)
    if added is not None:
        total = tl.load(added + row * SIZE + of, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        product = tl.load(products + (row * SLOTS + slot) * SIZE + of, mask=inside, other=0.0)
        total += product.to(tl.float32) * tl.load(weights + row * SLOTS + slot)
    tl.store(output + row * SIZE + of, total.to(output.dtype.element_ty), mask=inside)


def route(
    logits: Tensor,
    correction: Tensor | None,
    groups: tuple[int, int],
    slots: int,
    scores: str,
    scaling: float,
    *,
    is_normalized: bool,
) -> tuple[Tensor, Tensor]:
    """Chooses experts as outrider.engine.forward.layer_operations.LayerOperations.routed does."""
    num_rows, experts = logits.shape
    chosen = logits.new_empty(num_rows, slots, dtype=torch.int64)
    weights = logits.new_empty(num_rows, slots)
    _route[(num_rows,)](
        logits,
        correction,
        chosen,
        weights,
        scaling,
        EXPERTS=experts,
        WIDTH=triton.next_power_of_2(experts),
        SLOTS=slots,
        SLOT_WIDTH=triton.next_power_of_2(slots),
        GROUPS=groups[0],
        KEPT=groups[1],
        GROUP_WIDTH=triton.next_power_of_2(groups[0]),
        SCORES=scores,
        NORMALIZED=is_normalized,
        num_warps=1,
    )
    return chosen, weights


def multiply_chosen(
    rows: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: StoredWeight | Tensor,
    down: StoredWeight | Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    clamped: tuple[float, float] | None,
    added: Tensor | None,
    read: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each row's experts, plus ``added``, rounded once.

    Args:
        rows: [num_rows, hidden_size].
        chosen, weights: chosen experts and their weights, int64 and float32, [num_rows, slots] each.
        gate_up: [experts * 2 * width, hidden_size], the gates of an expert before its ups.
        down: [experts * hidden_size, width].
        biases: biases of gate_up and of down, each None without a bias.
        clamped: slope of the gate's sigmoid, and clamp limit of gate and up; None: the gate is silu.
        added: [num_rows, hidden_size].
        read: int32 [1] counter, to which the number of different experts is added.
    """
    (num_rows, slots), size = chosen.shape, rows.shape[1]
    experts, num_pairs = down.shape[0] // size, num_rows * slots
    pairs, begin = (chosen.new_empty(count, dtype=torch.int32) for count in (num_pairs, experts + 1))
    _sort[(experts,)](
        chosen, pairs, begin, read, num_pairs, EXPERTS=experts, WIDTH=PAIRS_AT_ONCE, num_warps=4
    )
    tiling = FEW if num_pairs <= FEW.rows * experts else MANY
    tiles = min(num_pairs, num_pairs // tiling.rows + experts)
    slope, limit = clamped or (None, None)
    given = pairs, begin, num_pairs, experts, tiles, tiling
    gated = rows.new_empty(num_pairs, down.shape[1])
    activation = {"GATED": True, "SLOPE": slope, "LIMIT": limit}
    _launch(rows.contiguous(), gate_up, biases[0], gated, *given, {"SLOTS": slots, **activation})
    products = rows.new_empty(num_pairs, size)
    activation = {"GATED": False, "SLOPE": None, "LIMIT": None}
    _launch(gated, down, biases[1], products, *given, {"SLOTS": 1, **activation})
    output = torch.empty_like(rows)
    width = min(NUMBERS_AT_ONCE, triton.next_power_of_2(size))
    _add_up[(num_rows, triton.cdiv(size, width))](
        products, weights, added, output, SLOTS=slots, SIZE=size, WIDTH=width, num_warps=4
    )
    return output


def _launch(
    rows: Tensor,
    weight: StoredWeight | Tensor,
    bias: Tensor | None,
    output: Tensor,
    pairs: Tensor,
    begin: Tensor,
    num_pairs: int,
    experts: int,
    tiles: int,
    tiling: ProductTiling,
    more: Mapping[str, Any],
) -> None:
    outputs = output.shape[1]
    _multiply_chosen[(tiles, triton.cdiv(outputs, tiling.outputs))](
        rows,
        pairs,
        begin,
        *parts_of(weight),
        bias,
        output,
        num_pairs,
        EXPERTS=experts,
        WIDTH=triton.next_power_of_2(experts),
        OUTPUTS=outputs,
        **constants(weight),
        **tiling.constants,
        **more,
    )
