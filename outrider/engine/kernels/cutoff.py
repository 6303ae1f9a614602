"""Search for the rank at which truncation cuts a row off, in few passes over unsorted candidates.

A ``source`` describes a row's candidates: where their ranks lie and how many there are, or how to read all
logits of the row if its candidates have not been collected; see load_ranks.
"""

import math

import triton
import triton.language as tl

from outrider.engine.kernels.logits import LOWEST_RANK, load_logits, rank_of, value_of

TILE = tl.constexpr(2048)  # candidates that are read together
UNITS = tl.constexpr(2.0**44)  # units of the likeliest token's mass: the sum of 2^19 tokens fits into 63 bits
_PIVOTS = tl.constexpr(4)  # ranks that a search tries in one pass
_INFINITY = tl.constexpr(math.inf)


@triton.jit
def lowest_rank(ID_BITS: tl.constexpr):
    """Returns a rank below which no token lies."""
    return rank_of(tl.full((), -_INFINITY, tl.float32), (1 << ID_BITS) - 1, ID_BITS)


@triton.jit
def rank_above(peak, ID_BITS: tl.constexpr):
    """Returns a rank that no token reaches."""
    return rank_of(peak, 0, ID_BITS) + 1


@triton.jit
def search(lowest, above, enough, peak, source, BY_MASS: tl.constexpr, ID_BITS: tl.constexpr):
    """Returns the largest rank that keeps enough tokens by number or by mass; ``lowest`` if none does."""
    _, length, _, _, _, _, _, _, _ = source
    while above - lowest > 1:
        step = tl.maximum((above - lowest) // (_PIVOTS + 1), 1)
        pivots = lowest + step * (1 + tl.arange(0, _PIVOTS))
        reached = tl.zeros([_PIVOTS], tl.int64)
        for start in range(0, length, TILE):
            ranks = load_ranks(start, source, ID_BITS)
            weights = mass_of(ranks, peak, ID_BITS) if BY_MASS else (ranks > LOWEST_RANK).to(tl.int64)
            reached += tl.sum(tl.where(ranks[None, :] >= pivots[:, None], weights[None, :], 0), axis=1)
        is_enough = reached >= enough
        lowest = tl.maximum(lowest, tl.max(tl.where(is_enough, pivots, lowest)))
        above = tl.minimum(above, tl.min(tl.where(is_enough, above, pivots)))
    return lowest


@triton.jit
def load_ranks(start, source, ID_BITS: tl.constexpr):
    """Returns ranks, int64 [TILE], of candidates if they have been collected, else of all tokens."""
    candidates, length, logits, row_stride, allowed, row, vocab_size, temperature, are_collected = source
    at = start + tl.arange(0, TILE)
    if are_collected:
        ranks = tl.load(candidates + at, mask=at < length, other=LOWEST_RANK)
    else:
        values, _ = load_logits(logits, row_stride, allowed, row, at, vocab_size, temperature)
        ranks = tl.where(at < length, rank_of(values, at, ID_BITS), LOWEST_RANK)
    return ranks


@triton.jit
def mass_of(ranks, peak, ID_BITS: tl.constexpr):
    """Returns the tokens' masses, int64, in UNITS: their sum does not depend on their order."""
    of_tokens = tl.where(ranks > LOWEST_RANK, value_of(ranks, ID_BITS), -_INFINITY)
    return (tl.exp(of_tokens - peak) * UNITS).to(tl.int64)
