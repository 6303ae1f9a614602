"""Product of rows with a weight on a GPU: a Triton kernel that converts stored codes in registers.

A code is converted exactly to the rows' type. Tensor cores multiply it, sums are float32, and the sum of a
span is multiplied by the scale of its group. Inputs are summed span by span in a fixed order, by instructions
that do not depend on the number of rows. So a row's result has the same bits alone and beside other rows.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.stored_weight import BITS, LEAST_SPAN, LONGEST_SPAN, StoredWeight


@dataclass(frozen=True)
class ProductTiling:
    """Size of a program's work, and its launch parameters."""

    outputs: int  # at least 64, for which an H100 uses a single kind of instruction
    rows: int
    warps: int
    stages: int  # loads in flight

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants with which a kernel is compiled and launched."""
        return {
            "TILE": self.outputs,
            "ROWS": self.rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }


# Each tiling serves up to ``rows`` rows, so that a weight is read once; the last serves more rows too.
TILINGS = (ProductTiling(64, 16, 4, 6), ProductTiling(64, 64, 4, 3), ProductTiling(128, 64, 8, 3))


@triton.jit
def _widened(codes, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Returns the values of codes, uint8, in a type that holds them exactly; plain numbers are only cast."""
    if KIND == "plain":
        return codes.to(TYPE)
    if KIND == "int8":
        return codes.to(tl.int8, bitcast=True).to(TYPE)
    if KIND == "int4":
        return (codes.to(tl.int32) - 8).to(TYPE)
    bits = codes.to(tl.int32)
    # Reinterpreted as float32, the bits are the value over a power of 2, also for subnormal numbers.
    if KIND == "e4m3":
        number = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 2.0**120
    else:
        number = ((bits & 7) << 22 | (bits & 8) << 28).to(tl.float32, bitcast=True) * 2.0**126
    return number.to(TYPE)


@triton.jit
def product_of_tile(
    own_rows,  # pointers [SPAN, ROWS] to the first inputs of each row
    is_row,  # [ROWS]
    at,  # int64 [TILE] outputs
    is_output,  # [TILE]
    codes,  # uint8 [outputs, INPUTS // SHARED], or numbers
    scales,  # [outputs, INPUTS // GROUP], or None
    zeros,  # int16 [outputs, INPUTS // GROUP], or None
    factors,  # float32 [outputs], or None
    bias,  # [outputs], or None
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,  # spans of bytes per iteration of the loop
    SHARED: tl.constexpr,  # codes in a byte
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Returns the products of a tile of outputs with some rows, plus bias, float32 [TILE, ROWS]."""
    of = tl.arange(0, SPAN)
    own_codes = codes + at[:, None] * (INPUTS // SHARED) + of[None, :]
    total = tl.zeros([TILE, ROWS], tl.float32)
    for first in range(0, INPUTS // SHARED, SPAN * SPANS):
        for span in tl.static_range(SPANS):
            place = first + span * SPAN
            packed = tl.load(own_codes + place, mask=is_output[:, None], other=0)
            for half in tl.static_range(SHARED):
                start = place * SHARED + half * SPAN
                given = tl.load(own_rows + start, mask=is_row[None, :], other=0.0)
                code = packed >> (4 * half) & 15 if SHARED == 2 else packed
                group = at * (INPUTS // GROUP) + start // GROUP
                if zeros is not None:
                    zero = tl.load(zeros + group, mask=is_output, other=0).to(tl.float32)
                    number = (_widened(code, KIND, tl.float32) - zero[:, None]).to(given.dtype)
                else:
                    number = _widened(code, KIND, given.dtype)
                if scales is None:
                    total = tl.dot(number, given, total, input_precision="ieee")
                else:
                    scale = tl.load(scales + group, mask=is_output, other=0.0).to(tl.float32)
                    total += tl.dot(number, given, input_precision="ieee") * scale[:, None]
    if factors is not None:
        total *= tl.load(factors + at, mask=is_output, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + at, mask=is_output, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    rows,  # [num_rows, INPUTS]
    codes,  # uint8 [OUTPUTS, INPUTS // SHARED]
    scales,  # [OUTPUTS, INPUTS // GROUP], or None
    zeros,  # int16 [OUTPUTS, INPUTS // GROUP], or None
    factors,  # float32 [OUTPUTS], or None
    bias,  # [OUTPUTS], or None
    added,  # [num_rows, OUTPUTS], or None
    output,  # [num_rows, OUTPUTS]
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,  # spans of bytes per iteration of the loop
    SHARED: tl.constexpr,  # codes in a byte
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # outputs of a program
    ROWS: tl.constexpr,  # rows of a program
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_row, is_output = row < num_rows, at < OUTPUTS
    total = product_of_tile(
        rows + row[None, :] * INPUTS + tl.arange(0, SPAN)[:, None],
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
    inside = is_output[:, None] & is_row[None, :]
    place = row[None, :] * OUTPUTS + at[:, None]
    if added is not None:
        total += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside)


def multiply(
    rows: Tensor,
    weight: StoredWeight | Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the product plus bias and ``added``, [num_rows, outputs]; rounds the sum once.

    Args:
        rows: [num_rows, inputs].
        weight: [outputs, inputs], for which ``is_multiplied`` returns True.
        bias: [outputs].
        added: [num_rows, outputs].
        dtype: type of the product; None: the type of the rows.
    """
    num_rows, outputs = len(rows), weight.shape[0]
    output = rows.new_empty(num_rows, outputs, dtype=dtype)
    tiling = next((each for each in TILINGS if num_rows <= each.rows), TILINGS[-1])
    _multiply[(triton.cdiv(num_rows, tiling.rows), triton.cdiv(outputs, tiling.outputs))](
        rows.contiguous(),
        *parts_of(weight),
        bias,
        None if added is None else added.contiguous(),
        output,
        num_rows,
        OUTPUTS=outputs,
        **constants(weight),
        **tiling.constants,
    )
    return output


def is_multiplied(weight: StoredWeight | Tensor) -> bool:
    """Whether the spans of a weight are long enough for tensor cores, so that ``multiply`` takes it."""
    return _span_of(weight) >= LEAST_SPAN


def parts_of(weight: StoredWeight | Tensor) -> tuple[Tensor | None, ...]:
    """Returns codes, scales, zeros and factors. The numbers of a plain weight take the place of codes."""
    if isinstance(weight, Tensor):
        return weight, None, None, None
    return weight.codes, weight.scales, weight.zeros, weight.factors


def constants(weight: StoredWeight | Tensor) -> dict[str, int | str]:
    """Returns the compile-time constants of a weight, except for its number of outputs."""
    inputs, span = weight.shape[1], _span_of(weight)
    if isinstance(weight, Tensor):
        return {"INPUTS": inputs, "GROUP": inputs, "SPAN": span, "SPANS": 1, "SHARED": 1, "KIND": "plain"}
    spans = weight.codes.shape[1] // span
    return {
        "INPUTS": inputs,
        "GROUP": weight.group,
        "SPAN": span,
        "SPANS": gcd(LONGEST_SPAN // span, spans),
        "SHARED": 8 // BITS[weight.kind],
        "KIND": weight.kind,
    }


def _span_of(weight: StoredWeight | Tensor) -> int:
    """Returns the number of codes, or of plain numbers, of an output that a kernel reads at a time."""
    return (
        gcd(LONGEST_SPAN // weight.itemsize, weight.shape[1]) if isinstance(weight, Tensor) else weight.span
    )
