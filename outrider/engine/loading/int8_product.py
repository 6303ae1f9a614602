"""Products of 8 bit codes whose sums are exact on every processor.

Weight codes range from -127 to 127, input codes from 1 to 255 with zero at 128. Input codes are unsigned
because oneDNN has kernels for signed inputs only for processors with AMX. Processors with 8 bit instructions
(VNNI, AMX) add products in 32 bits. Older processors first add two products in 16 bits, which saturate. Input
codes that are split into two halves do not saturate. If oneDNN has no correct kernel, products are computed
in floating point, which is exact as well but slower.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from outrider.engine.forward.linear import tried_outputs

logger = logging.getLogger(__name__)

LARGEST_INT8 = 127
ZERO_UINT8 = 128
EXACT_INPUTS = 1024  # 1024 * 127 * 127 is below 2**24, so that float32 holds each sum exactly
TRIED_ROWS = (1, 5)  # numbers of rows; a single row uses other kernels

# Takes codes of inputs, uint8 [rows, inputs], and returns float32 [rows, outputs]
Int8Product = Callable[[Tensor], Tensor]


class OneDnnInt8:
    """Products by oneDNN, with whole input codes or with input codes in two halves."""

    def __init__(self, codes: Tensor, scales: Tensor, *, in_halves: bool) -> None:
        """
        Args:
            codes: int8 [outputs, inputs] codes of the weight
            scales: float32 [outputs] factors of the sums
        """
        self.packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self.scales, self.zeros = scales, torch.zeros(len(codes), dtype=torch.int64)
        self._in_halves = in_halves

    def __call__(self, codes: Tensor) -> Tensor:
        if not self._in_halves:
            return self._product(codes, ZERO_UINT8)
        half, rows = codes >> 1, len(codes)
        # A half is at most 128, so that the sum of two products with 127 is below 2**15.
        product = self._product(torch.cat([half, codes - half]), ZERO_UINT8 // 2)
        return product[:rows] + product[rows:]

    def _product(self, codes: Tensor, zero: int) -> Tensor:
        weights = self.packed, self.scales, self.zeros, None
        return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
            codes, 1.0, zero, *weights, 1.0, 0, torch.float32, "none", [], ""
        )


class FloatInt8:
    """Products in float32, of few inputs at a time, so that each sum is exact in any order."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """
        Args:
            codes: int8 [outputs, inputs] codes of the weight
            scales: float32 [outputs] factors of the sums
        """
        self.codes, self.scales = codes, scales

    def __call__(self, codes: Tensor) -> Tensor:
        rows = codes.float().sub_(ZERO_UINT8)
        sums = torch.zeros(len(rows), len(self.codes))
        for first in range(0, rows.shape[1], EXACT_INPUTS):
            part = slice(first, first + EXACT_INPUTS)
            sums += rows[:, part] @ self.codes[:, part].float().t()
        return sums.mul_(self.scales)


KINDS: dict[str, Callable[[Tensor, Tensor], Int8Product]] = {  # the fastest first
    "whole": partial(OneDnnInt8, in_halves=False),
    "halves": partial(OneDnnInt8, in_halves=True),
    "floats": FloatInt8,
}


def int8_product(codes: Tensor, scales: Tensor) -> Int8Product:
    """Returns the fastest product whose sums are exact on this machine.

    Args:
        codes: int8 [outputs, inputs] codes of the weight
        scales: float32 [outputs] factors of the sums
    """
    return KINDS[right_kind(*codes.shape)](codes, scales)


@cache
def right_kind(outputs: int, inputs: int) -> str:
    """Returns the first of KINDS whose sums are exact for products of this size, found by trials.

    A trial multiplies the largest codes, whose sums are the first to overflow.
    """
    generator = torch.Generator().manual_seed(0)
    weight = _largest_codes(tried_outputs(outputs), inputs, generator)
    rows = _largest_codes(max(TRIED_ROWS), inputs, generator)
    expected = (rows.double() @ weight.double().t()).float()
    codes, scales = (rows + ZERO_UINT8).to(torch.uint8), torch.ones(len(weight))
    reasons = []
    for name, kind in KINDS.items():
        try:
            product = kind(weight.to(torch.int8), scales)
            tried = [product(codes[:count]) for count in TRIED_ROWS]
        except (AttributeError, RuntimeError) as error:  # oneDNN's operators are no public API
            reasons.append(str(error))
            continue
        if all(torch.allclose(found, expected[: len(found)], rtol=1e-5) for found in tried):
            break
        reasons.append(f"a product of {name} codes is wrong")
    if name == "floats":
        _say_slow("; ".join(reasons))
    return name


def _largest_codes(count: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Returns int64 [count, inputs] largest codes of random sign, all positive in the first row."""
    codes = LARGEST_INT8 * (2 * torch.randint(0, 2, (count, inputs), generator=generator) - 1)
    codes[0] = LARGEST_INT8
    return codes


@cache
def _say_slow(reasons: str) -> None:
    """Logs the reasons once for all sizes."""
    logger.warning("products in 8 bit are computed in floating point, which is slower: oneDNN: %s", reasons)
