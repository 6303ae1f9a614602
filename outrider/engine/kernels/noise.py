"""Keyed Gumbel noise of outrider/decoding/noise.py in Triton: bit-identical except for the logarithms."""

import triton
import triton.language as tl

from outrider.decoding import noise, philox

_CELL = tl.constexpr(noise.CELL)
_ROUNDS = tl.constexpr(philox.ROUNDS)
_HIGH = tl.constexpr(int(philox.Purpose.CHOICE_HIGH))
_LOW = tl.constexpr(int(philox.Purpose.CHOICE_LOW))


@triton.jit
def gumbel_of_blocks(key, position, first_block, NUM_BLOCKS: tl.constexpr):
    """Returns the noise, float32 [8 * NUM_BLOCKS], of the tokens of consecutive Philox blocks."""
    blocks = first_block + tl.arange(0, NUM_BLOCKS)
    high_0, high_1, high_2, high_3 = _philox(key, position, blocks, _HIGH)
    low_0, low_1, low_2, low_3 = _philox(key, position, blocks, _LOW)
    # Philox runs once per block of 8 tokens. The joins interleave its words in the order of the tokens.
    even = tl.join(
        tl.join(_lower(high_1, low_1), _lower(high_3, low_3)),
        tl.join(_lower(high_0, low_0), _lower(high_2, low_2)),
    )
    odd = tl.join(
        tl.join(_upper(high_1, low_1), _upper(high_3, low_3)),
        tl.join(_upper(high_0, low_0), _upper(high_2, low_2)),
    )
    return _gumbel(tl.reshape(tl.join(even, odd), [8 * NUM_BLOCKS]))


@triton.jit
def gumbel_at(key, position, tokens):
    """Returns the noise of each token, float32, in the shape of tokens. tokens: int32."""
    high = _half(key, position, tokens, _HIGH)
    return _gumbel((high << 16) | _half(key, position, tokens, _LOW))


@triton.jit
def _half(key, position, tokens, PURPOSE: tl.constexpr):
    word_0, word_1, word_2, word_3 = _philox(key, position, tokens // 8, PURPOSE)
    group = tokens % 8
    first_pair = tl.where(group < 2, word_1, word_0)
    second_pair = tl.where(group < 6, word_3, word_2)
    word = tl.where(group < 4, first_pair, second_pair)
    return tl.where(group % 2 == 0, word & 0xFFFF, word >> 16)


@triton.jit
def _philox(key, position, blocks, PURPOSE: tl.constexpr):
    zeros = tl.zeros_like(blocks)
    return tl.philox(key, blocks, zeros + position.to(tl.int32), zeros, zeros + PURPOSE, _ROUNDS)


@triton.jit
def _lower(high, low):
    return (high << 16) | (low & 0xFFFF)


@triton.jit
def _upper(high, low):
    return (high & 0xFFFF0000) | (low >> 16)


@triton.jit
def _gumbel(words):
    cells = (words.to(tl.float32) + 0.5) * _CELL
    # log1p(-cells): the quotient corrects the rounding error of 1 - cells.
    rest = 1.0 - cells
    log1p = tl.where(rest == 1.0, -cells, tl.log(rest) * (cells / (1.0 - rest)))
    return -tl.log(-log1p)
