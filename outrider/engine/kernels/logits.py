"""Logits for the kernels that choose tokens: masked, divided by the temperature, and mapped to ranks.

A token's *rank* is an int64 that grows with its logit; of equal logits the lower token id has the higher
rank. So no two tokens of a row have the same rank, and the cutoff of a setting is a single number.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))
_INT32_MAX = tl.constexpr(2**31 - 1)

LOWEST_RANK = tl.constexpr(-(2**63))  # below the rank of any token


@triton.jit
def load_logits(logits, row_stride, allowed, row, tokens, vocab_size, temperature):
    """Returns masked and scaled logits, float32, and whether each is faulty, bool, in the shape of tokens.

    NaN and positive infinity are faulty. Tokens with a faulty logit or beyond the vocabulary are banned.
    """
    inside = tokens < vocab_size
    given = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=inside, other=-_INFINITY)
    given = given.to(tl.float32)
    scaled = tl.div_rn(given, temperature)
    if allowed is not None:
        words_per_row = tl.cdiv(vocab_size, 32)
        words = tl.load(allowed + row.to(tl.int64) * words_per_row + tokens // 32, mask=inside, other=0)
        scaled = tl.where((words >> (tokens % 32)) & 1 != 0, scaled, -_INFINITY)
    is_faulty = (given != given) | (given == _INFINITY) | (scaled == _INFINITY)
    scaled = tl.where(scaled < _INFINITY, scaled, -_INFINITY)
    return tl.where(scaled == 0.0, 0.0, scaled), is_faulty  # +0 and -0 would have different ranks


@triton.jit
def rank_of(values, tokens, ID_BITS: tl.constexpr):
    """Returns the ranks, int64, of tokens with these logits. values: float32 without negative zeros."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & _INT32_MAX)
    return (ordered.to(tl.int64) << ID_BITS) | (((1 << ID_BITS) - 1) - tokens)


@triton.jit
def value_of(ranks, ID_BITS: tl.constexpr):
    """Returns the logits, float32, of tokens with these ranks."""
    ordered = (ranks >> ID_BITS).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _INT32_MAX)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(ranks, ID_BITS: tl.constexpr):
    """Returns the ids, int32, of tokens with these ranks."""
    return ((1 << ID_BITS) - 1) - (ranks & ((1 << ID_BITS) - 1)).to(tl.int32)
