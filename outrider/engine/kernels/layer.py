"""Operations of a decoder layer between its matrix products, as four Triton kernels.

Each kernel replaces two to five kernels of torch, because in a decoding step the launch of a kernel takes
longer than its arithmetic. Each row is computed by itself, so its result does not depend on the batch. Each
product and each sum is rounded to the model's type, as in transformers.
"""

import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.cache.narrow import Scales, codes_of
from outrider.engine.kernels.narrow import narrowed

HEADS_AT_ONCE = 8  # heads of a program of ``_rotate_and_store``
NUMBERS_AT_ONCE = 1024  # numbers of a program of ``_gate``, at most
NUMBERS_OF_A_WARP = 512  # numbers of a normed row per warp


@triton.jit
def _normed(numbers, scale, epsilon, SIZE: tl.constexpr, TYPE: tl.constexpr):
    """Returns the RMS norm of float32 [WIDTH]; the numbers beyond SIZE are padding with zeros."""
    mean = tl.sum(numbers * numbers, 0) / SIZE
    normed = (numbers * tl.rsqrt(mean + epsilon)).to(TYPE).to(tl.float32)
    return (normed * scale).to(TYPE)


@triton.jit
def _norm(
    rows,  # [num_tokens, groups, SIZE], by the stride of its first dimension
    weight,  # [groups, SIZE]
    output,  # [num_tokens, groups, SIZE], by output_stride
    stride,
    output_stride,
    epsilon,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of = tl.arange(0, WIDTH)
    inside = of < SIZE
    numbers = tl.load(rows + token * stride + group * SIZE + of, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + group * SIZE + of, mask=inside, other=0.0).to(tl.float32)
    to = output + token * output_stride + group * SIZE + of
    tl.store(to, _normed(numbers, scale, epsilon, SIZE, output.dtype.element_ty), mask=inside)


@triton.jit
def _sum_and_norm(
    parts,  # [RANKS, num_tokens, SIZE], contiguous
    weight,  # [SIZE]
    states,  # [num_tokens, SIZE]
    output,  # [num_tokens, SIZE]
    epsilon,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two
):
    # num_tokens is no argument: Triton turns an argument of value 1 into a constant, which lacks ``to``.
    token, num_tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    of = tl.arange(0, WIDTH)
    inside = of < SIZE
    own = parts + token * SIZE + of
    total = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        part = tl.load(own + num_tokens * rank * SIZE, mask=inside, other=0.0)
        total += part.to(tl.float32)
    rounded = total.to(states.dtype.element_ty)
    tl.store(states + token * SIZE + of, rounded, mask=inside)
    scale = tl.load(weight + of, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(rounded.to(tl.float32), scale, epsilon, SIZE, output.dtype.element_ty)
    tl.store(output + token * SIZE + of, normed, mask=inside)


@triton.jit
def _rotate_and_store(
    product,  # [num_tokens, HEADS + 2 * KV_HEADS, DIM]
    cosines,  # [num_tokens, TURNING]
    sines,  # [num_tokens, TURNING]
    slots,  # int64 [num_tokens]
    query,  # [num_tokens, HEADS, DIM]
    keys,  # [slots, KV_HEADS, DIM], uint8 in a narrow cache
    values,  # [slots, KV_HEADS, DIM], same type as keys
    key_factor,  # power of two by which keys are multiplied for a narrow cache
    value_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNING: tl.constexpr,  # leading dimensions of a head that are rotated
    WIDTH: tl.constexpr,  # a power of two
    TILE: tl.constexpr,  # heads of a program
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    of = tl.arange(0, WIDTH)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (of < DIM)[None, :]
    start = product + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * DIM
    own = tl.load(start + of[None, :], mask=inside, other=0.0)
    turns = of < TURNING
    other = tl.where(turns, (of + TURNING // 2) % TURNING, of)
    pair = tl.load(start + other[None, :], mask=inside, other=0.0)
    cosine = tl.load(cosines + token * TURNING + of, mask=turns, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sines + token * TURNING + of, mask=turns, other=0.0).to(tl.float32)[None, :]
    straight = (own.to(tl.float32) * cosine).to(own.dtype).to(tl.float32)
    across = (pair.to(tl.float32) * sine).to(own.dtype).to(tl.float32)
    turned = (straight + across).to(own.dtype)
    to_query = inside & (head < HEADS)[:, None]
    tl.store(query + (token * HEADS + head[:, None]) * DIM + of[None, :], turned, mask=to_query)
    slot = tl.load(slots + token)
    key_head, value_head = head - HEADS, head - HEADS - KV_HEADS
    to_key = inside & ((key_head >= 0) & (key_head < KV_HEADS))[:, None]
    key, value = turned, own
    if keys.dtype.element_ty == tl.uint8:
        key, value = narrowed(turned, key_factor), narrowed(own, value_factor)
    tl.store(keys + (slot * KV_HEADS + key_head[:, None]) * DIM + of[None, :], key, mask=to_key)
    to_value = inside & (value_head >= 0)[:, None]
    tl.store(values + (slot * KV_HEADS + value_head[:, None]) * DIM + of[None, :], value, mask=to_value)


@triton.jit
def _gate(
    gate_up,  # [num_tokens, 2 * SIZE]
    output,  # [num_tokens, SIZE]
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # numbers of a program
):
    token = tl.program_id(0).to(tl.int64)
    of = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = of < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + of, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + of, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * SIZE + of, (opened * up).to(output.dtype.element_ty), mask=inside)


def norm(rows: Tensor, weight: Tensor, epsilon: float, output: Tensor) -> None:
    """Writes the RMS norm of each group of each row.

    Args:
        rows: [num_tokens, groups, size].
        weight: [groups, size], or [size] for one group.
        output: shape of ``rows``; may be ``rows`` itself.
    """
    size = rows.shape[2]
    width = triton.next_power_of_2(size)
    _norm[rows.shape[:2]](
        rows,
        weight,
        output,
        rows.stride(0),
        output.stride(0),
        epsilon,
        SIZE=size,
        WIDTH=width,
        num_warps=_warps(width),
    )


def sum_and_norm(parts: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Adds the ranks' parts in float32 in rank order, rounds the sum once, and computes its RMS norm.

    Args:
        parts: [ranks, num_tokens, size], contiguous.
        weight: [size].

    Returns:
        sum and its RMS norm, [num_tokens, size] each, of the parts' dtype
    """
    ranks, num_tokens, size = parts.shape
    width = triton.next_power_of_2(size)
    states, output = parts.new_empty(2, num_tokens, size)
    _sum_and_norm[(num_tokens,)](
        parts,
        weight,
        states,
        output,
        epsilon,
        RANKS=ranks,
        SIZE=size,
        WIDTH=width,
        num_warps=_warps(width),
    )
    return states, output


def _warps(width: int) -> int:
    """Returns the number of warps of a program that computes a row's norm."""
    return min(max(width // NUMBERS_OF_A_WARP, 1), 16)


def rotate_and_store(
    product: Tensor,  # [num_tokens, heads + 2 * kv_heads, dim]
    rotation: tuple[Tensor, Tensor],  # cosines and sines, each [num_tokens, ..., rotated dimensions]
    slots: Tensor | slice,  # int64 [num_tokens]; on a GPU a tensor
    keys: Tensor,  # [..., kv_heads, dim], all slots
    values: Tensor,  # [..., kv_heads, dim]
    scales: Scales,
) -> Tensor:
    """Rotates queries and keys, stores keys and values; returns the queries [num_tokens, heads, dim]."""
    (num_tokens, all_heads, dim), kv_heads = product.shape, keys.shape[-2]
    heads = all_heads - 2 * kv_heads
    query = product.new_empty(num_tokens, heads, dim)
    _rotate_and_store[(num_tokens, triton.cdiv(all_heads, HEADS_AT_ONCE))](
        product,
        *rotation,
        slots,
        query,
        codes_of(keys),
        codes_of(values),
        1.0 / scales.keys,
        1.0 / scales.values,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        TURNING=rotation[0].shape[-1],
        WIDTH=triton.next_power_of_2(dim),
        TILE=HEADS_AT_ONCE,
        num_warps=4,
    )
    return query


def gate(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [num_tokens, size], of gate and up side by side, [num_tokens, 2 * size]."""
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    width = min(NUMBERS_AT_ONCE, triton.next_power_of_2(size))
    _gate[(num_tokens, triton.cdiv(size, width))](gate_up, output, SIZE=size, WIDTH=width, num_warps=4)
    return output
