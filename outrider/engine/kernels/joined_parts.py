"""Parts of a context in attention: where they begin, and how their partial results are combined.

Parts begin where outrider/engine/inputs/context_parts.py says. All kernels combine parts by this arithmetic,
in the order of the parts. So a row has the same bits whether a single program or several programs read its
context.
"""

import triton
import triton.language as tl

from outrider.engine.inputs import context_parts

LOG2_E = tl.constexpr(1.4426950408889634)

FIRST, SECOND = tl.constexpr(context_parts.SHORTEST), tl.constexpr(context_parts.SECOND)
PARTS = tl.constexpr(context_parts.PARTS)
JOINED_AT_ONCE = tl.constexpr(8)  # parts that are loaded per iteration of the loop


@triton.jit
def num_parts_of(slots, THIRD: tl.constexpr):
    """Returns the number of parts of a context of ``slots`` slots, as context_parts.parts_of does."""
    second = tl.maximum(slots - PARTS * FIRST, 0)
    third = tl.maximum(second - PARTS * SECOND, 0)
    return (
        tl.cdiv(tl.minimum(slots, PARTS * FIRST), FIRST)
        + tl.cdiv(tl.minimum(second, PARTS * SECOND), SECOND)
        + tl.cdiv(third, THIRD)
    )


@triton.jit
def begin_of(part, THIRD: tl.constexpr):
    """Returns the number of slots before a part."""
    second = tl.maximum(part - PARTS, 0)
    return (
        tl.minimum(part, PARTS) * FIRST
        + tl.minimum(second, PARTS) * SECOND
        + tl.maximum(second - PARTS, 0) * THIRD
    )


@triton.jit
def joined(largest, total, summed, next_largest, next_total, next_summed, unit):
    """Combines two parts; returns the largest score, the sum of weights and the sum of weighted values."""
    new = tl.maximum(largest, next_largest)
    finite = tl.where(new == float("-inf"), 0.0, new)  # no slot is visible so far
    fade, share = tl.exp2((largest - finite) * unit), tl.exp2((next_largest - finite) * unit)
    both = summed * fade[:, None] + next_summed * share[:, None]
    return new, total * fade + next_total * share, both


@triton.jit
def output_of(largest, total, summed, unit, sinks, query_head, SINKS: tl.constexpr):
    """Returns the attention output of lines whose parts are all combined."""
    divisor = tl.where(total == 0.0, 1.0, total)
    summed = summed / divisor[:, None]
    if SINKS:
        weight = tl.where(total == 0.0, float("-inf"), largest * unit + tl.log2(divisor))
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2_E
        top = tl.maximum(weight, sink)
        summed = summed * (tl.exp2(weight - top) / (tl.exp2(weight - top) + tl.exp2(sink - top)))[:, None]
    return summed


@triton.jit(do_not_specialize=["splits"])
def join_parts(
    parts,  # float32 [split tiles * TILE, heads, splits, value_dim] weighted values
    weights,  # float32 [split tiles * TILE, heads, splits, 2] largest scores, and sums of weights
    tiles,  # int64 [num_tiles, TILE_FIELDS]
    work,  # int64 [5] numbers of PagedInput.work
    sinks,  # [heads]
    output,  # [rows, heads, value_dim]
    splits,
    scale,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    THIRD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1)
    if number >= tl.load(work + 1):
        return
    tile = tiles + number * FIELDS
    first, count = tl.load(tile + 1), tl.load(tile + 2)
    num_parts = num_parts_of(tl.load(tile + 3).to(tl.int32), THIRD)
    lines, of_value = tl.arange(0, TILE), tl.arange(0, VALUE_WIDTH)
    real, has_value = lines < count, of_value < VALUE_DIM
    parts_of_line = tl.where(real, num_parts, 0)
    unit = LOG2_E if SOFTCAP else scale * LOG2_E
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, VALUE_WIDTH), tl.float32)
    at = ((number * TILE + lines) * HEADS + head).to(tl.int64) * splits
    for begin in range(0, num_parts, JOINED_AT_ONCE):
        for next_part in tl.static_range(JOINED_AT_ONCE):
            part = begin + next_part
            held = part < parts_of_line
            values = tl.load(
                parts + (at + part)[:, None] * VALUE_DIM + of_value[None, :],
                mask=held[:, None] & has_value[None, :],
                other=0.0,
            )
            part_largest = tl.load(weights + 2 * (at + part), mask=held, other=float("-inf"))
            part_total = tl.load(weights + 2 * (at + part) + 1, mask=held, other=0.0)
            largest, total, summed = joined(largest, total, summed, part_largest, part_total, values, unit)
    given = output_of(largest, total, summed, unit, sinks, head, SINKS)
    to = (first + lines) * HEADS + head
    tl.store(
        output + to[:, None] * VALUE_DIM + of_value[None, :],
        given.to(output.dtype.element_ty),
        mask=real[:, None] & has_value[None, :],
    )
