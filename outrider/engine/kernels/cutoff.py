"""Search for the rank at which top-k or top-p truncates a row, in few passes over unsorted candidates.

Ranks are those of logits.py. A ``source`` is a tuple that describes a row's candidates: an array of their
ranks with its length, or all logits of the row if candidates were not collected. See load_ranks.
"""

import math

import triton
import triton.language as tl

from outrider.engine.kernels.logits import LOWEST_RANK, load_logits, rank_of, value_of

TILE = tl.constexpr(2048)  # candidates that are read at a time
UNITS = tl.constexpr(2.0**44)  # integer mass of the likeliest token: a sum of 2^19 tokens fits into 63 bits
_PIVOTS = tl.constexpr(4)  # ranks that a search tries in one pass
_INFINITY = tl.constexpr(math.inf)


@triton.jit
def lowest_rank(ID_BITS: tl.constexpr):
    """Returns a lower bound of the ranks of all tokens."""
    return rank_of(tl.full((), -_INFINITY, tl.float32), (1 << ID_BITS) - 1, ID_BITS)


@triton.jit
def rank_above(peak, ID_BITS: tl.constexpr):
    """Returns a rank above the ranks of all tokens. peak: largest logit of the row."""
    return rank_of(peak, 0, ID_BITS) + 1


@triton.jit
def search(lowest, above, enough, peak, source, BY_MASS: tl.constexpr, ID_BITS: tl.constexpr):
    """Returns the largest cutoff rank that keeps enough tokens; ``lowest`` if no rank does.

    lowest, above: bounds of the search. enough: number of tokens to keep, or their mass in UNITS.
    """
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
    """Returns ranks, int64 [TILE], from ``start`` on: of collected candidates, or else of all tokens."""
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
    """Returns the tokens' probability masses, int64, in UNITS: their sum does not depend on the order."""
    of_tokens = tl.where(ranks > LOWEST_RANK, value_of(ranks, ID_BITS), -_INFINITY)
    return (tl.exp(of_tokens - peak) * UNITS).to(tl.int64)
