"""Conversions of a narrow cache's numbers in registers, by integers: alike on every GPU.

They say what outrider/engine/cache/narrow.py says of all finite numbers.
"""

import triton
import triton.language as tl

from outrider.engine.cache.narrow import LARGEST

_LARGEST = tl.constexpr(LARGEST)
NOT_A_NUMBER = tl.constexpr(127)  # code
LEAST_NORMAL = tl.constexpr(2.0**-6)
STEPS_OF_SUBNORMALS = tl.constexpr(2.0**14)  # a float32 here has the same steps as narrow subnormal numbers
STEPS_BITS = tl.constexpr((127 + 14) << 23)  # its bits
EXPONENT = tl.constexpr((127 - 7) << 3)  # difference of the exponents' biases, in a code's place


@triton.jit
def narrowed(numbers, factor):
    """Returns numbers, times a power of two, as a narrow cache stores them: uint8 codes."""
    wide = numbers.to(tl.float32) * factor
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 128
    size = tl.minimum(tl.abs(wide), _LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - EXPONENT
    subnormal = (size + STEPS_OF_SUBNORMALS).to(tl.int32, bitcast=True) - STEPS_BITS
    code = tl.where(size < LEAST_NORMAL, subnormal, normal)
    code = tl.where(wide - wide == 0.0, code, NOT_A_NUMBER)
    return (code | sign).to(tl.uint8)


@triton.jit
def widened(stored, TYPE: tl.constexpr):
    """Returns numbers of a cache in the model's type; of a narrow cache they come as uint8 codes."""
    if stored.dtype != tl.uint8:
        return stored
    bits = stored.to(tl.int32)
    # As a float32 the bits are the number over a power of 2, those of subnormal numbers included.
    return (((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 2.0**120).to(TYPE)
