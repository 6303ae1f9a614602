"""Conversions to and from the FP8 codes of a narrow cache, by integer arithmetic: identical on every GPU.

For all finite numbers the results are those of outrider/engine/cache/narrow.py.
"""

import triton
import triton.language as tl

from outrider.engine.cache.narrow import LARGEST

_LARGEST = tl.constexpr(LARGEST)
NOT_A_NUMBER = tl.constexpr(127)  # code of NaN
LEAST_NORMAL = tl.constexpr(2.0**-6)
STEPS_OF_SUBNORMALS = tl.constexpr(2.0**14)  # float32 numbers from here on are spaced like FP8 subnormals
STEPS_BITS = tl.constexpr((127 + 14) << 23)  # bits of STEPS_OF_SUBNORMALS
EXPONENT = tl.constexpr((127 - 7) << 3)  # difference of the exponent biases, shifted to a code's exponent


@triton.jit
def narrowed(numbers, factor):
    """Returns numbers times ``factor``, a power of two, as the uint8 codes of a narrow cache."""
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
    """Returns cached numbers in the model's type. Numbers of type uint8 are codes of a narrow cache."""
    if stored.dtype != tl.uint8:
        return stored
    bits = stored.to(tl.int32)
    # Reinterpreted as float32, these bits are the number over 2^120, also for subnormal numbers.
    return (((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 2.0**120).to(TYPE)
