"""The sampling settings of rows, read from PackedRows (outrider/engine/inputs/choice_input.py)."""

import math

import triton
import triton.language as tl

_INFINITY = tl.constexpr(math.inf)


@triton.jit
def load_settings(integers, numbers, num_rows, row):
    """top_k, temperature, top_p, and how far below the largest logit min_p cuts off."""
    top_k = tl.load(integers + 2 * num_rows + row)
    temperature = tl.load(numbers + row).to(tl.float32)
    top_p = tl.load(numbers + num_rows + row)
    return top_k, temperature, top_p, tl.load(numbers + 2 * num_rows + row).to(tl.float32)


@triton.jit
def is_truncated(top_k, top_p, distance):
    return (top_k > 0) | (top_p < 1.0) | (distance > -_INFINITY)
