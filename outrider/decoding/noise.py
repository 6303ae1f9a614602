"""Keyed Gumbel noise: a stateless function of noise key, position and token.

Each token has 32 random bits, identical on every device and in every batch. They are two halves of 16 bits
from different Philox streams. The high halves alone give an upper bound on the noise of a whole vocabulary,
at half the cost. Exact noise is then computed for the few tokens that might win. Floating-point steps stay
within 2 ulp.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, WORD, Purpose

_HALF_BITS = 16
_TOKENS_PER_BLOCK = 8  # tokens of a Philox block: 128 bits
_BLOCKS_AT_ONCE = 2**14  # Philox blocks; the working set then fits the L2 cache of a core
# Slightly below 2^-32: the largest words round up to 2^32 in float32, and 2^32 * CELL must be below 1.
CELL = 2.0**-32 * (1 - 2.0**-24)
_BELOW = 1 - 2.0**-16  # factor that outweighs rounding: the result stays below v
_LEAST = 2.0**-34  # a number below v if the high half is 0
_WHOLE = Purpose.CHOICE_HIGH, Purpose.CHOICE_LOW
# Numbers that each round adds to both halves of the key: [ROUNDS, 2, 1, 1].
_STEPS = (np.arange(ROUNDS)[:, None] * np.array(KEY_STEPS))[:, :, None, None]

Integers = NDArray[np.int64]
Array = TypeVar("Array", Integers, Tensor)


def gumbel(
    keys: Sequence[int],  # [num_rows] unsigned 64-bit noise keys
    positions: Sequence[int],  # [num_rows]
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns standard Gumbel noise, float32 [num_rows, vocab_size].

    The noise is -log(-log(1 - v)) with v = (word + 0.5) / 2^32. The likely winners of argmax(logits + noise)
    have small v, for which float32 keeps all 32 bits of the word.
    """
    return _to_gumbel_(_bits(keys, positions, _WHOLE, vocab_size, device))


def gumbel_at(keys: Sequence[int], positions: Sequence[int], rows: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the values of gumbel() at (rows, token_ids), both int64 [num_pairs]: float32 [num_pairs]."""
    return _to_gumbel_(words_at(keys, positions, rows, token_ids).float())


def gumbel_bound(
    keys: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns an upper bound of gumbel() that is tight for large values: float32 [num_rows, vocab_size].

    The bound is -log(u), with u < v from the high half of v alone. It holds because -log(1 - v) >= v.
    """
    bound = _bits(keys, positions, _WHOLE[:1], vocab_size, device)
    return bound.mul_(2.0**-_HALF_BITS * _BELOW).add_(_LEAST).log_().neg_()


def words_at(keys: Sequence[int], positions: Sequence[int], rows: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the tokens' 32 random bits: int64 [num_pairs].

    The high half of token 8k + j is the j-th group of 16 bits of the Philox block with the counter
    (k, position, 0, CHOICE_HIGH). The words of the block are taken in the order second, first, fourth, third,
    least significant bits first. The low half is taken in the same way from the counter with CHOICE_LOW.
    """
    streams = torch.from_numpy(_streams(keys, positions, _WHOLE)).to(rows.device)
    left, right = _philox(streams[..., rows], token_ids // _TOKENS_PER_BLOCK)
    group = token_ids % _TOKENS_PER_BLOCK
    lanes = torch.where(group < 4, left, right)
    high, low = (lanes >> group % 4 * _HALF_BITS).bitwise_and_(2**_HALF_BITS - 1)
    words: Tensor = high << _HALF_BITS | low
    return words


def _bits(
    keys: Sequence[int],
    positions: Sequence[int],
    purposes: Sequence[Purpose],
    vocab_size: int,
    device: torch.device | str,
) -> Tensor:
    """Returns 16 bits of each token for each purpose, joined to one integer: float32 [num_rows, vocab_size].

    The bits of the first purpose are the most significant.
    """
    streams = _streams(keys, positions, purposes)[..., None]
    num_blocks = -(-vocab_size // _TOKENS_PER_BLOCK)
    bits = torch.empty(len(keys), num_blocks * _TOKENS_PER_BLOCK, device=device)
    step = num_blocks if bits.is_cuda else max(1, _BLOCKS_AT_ONCE // max(1, len(keys) * len(purposes)))
    for start in range(0, num_blocks, step):
        blocks = np.arange(start, min(start + step, num_blocks))
        tile = bits[:, start * _TOKENS_PER_BLOCK :][:, : len(blocks) * _TOKENS_PER_BLOCK]
        states = _on(bits.device, streams, blocks)
        high, *low = states.permute(1, 2, 3, 0).contiguous().view(torch.uint16).flatten(2)
        tile.copy_(high)
        for part in low:
            tile.mul_(2.0**_HALF_BITS).add_(part.float())
    return bits[:, :vocab_size]


def _on(device: torch.device, streams: Integers, blocks: Integers) -> Tensor:
    if device.type == "cpu":  # numpy has much less overhead per operation than torch
        return torch.from_numpy(_philox(streams, blocks))
    return _philox(torch.from_numpy(streams).to(device), torch.from_numpy(blocks).to(device))


def _streams(keys: Sequence[int], positions: Sequence[int], purposes: Sequence[Purpose]) -> Integers:
    """Returns the Philox state after the first round, still without the token, and the keys of later rounds.

    int64 [ROUNDS, 2, num_purposes, num_rows]. Two words are packed into an int64, the first in the high half,
    so that a 64-bit product is the next pair.
    """
    streams = np.empty((ROUNDS, 2, len(purposes), len(keys)), np.int64)
    streams[:, 0] = key = np.array(keys, np.uint64).view(np.int64)
    streams[:, 1] = key >> 32
    streams += _STEPS
    streams <<= 32  # drops the high bits: words have 32 bits
    streams[0, 0] ^= np.array(positions, np.int64) << 32
    streams[0, 1] ^= np.array(purposes, np.int64)[:, None] << 32
    return streams


def _philox(streams: Array, blocks: Array) -> Array:
    """Returns each block as words (first, second) and (third, fourth), packed as in streams: int64 [2, ...].

    Uses operators that arrays and tensors share, in place if possible: memory traffic and allocation dominate
    the cost.
    """
    first, *later = streams
    states: Any = first ^ blocks * 0
    states[1] ^= blocks * MULTIPLIERS[0]
    for keys in later:
        products = states >> 32
        products &= WORD
        products[0] *= MULTIPLIERS[0]
        products[1] *= MULTIPLIERS[1]
        states <<= 32
        states ^= keys
        states[0] ^= products[1]
        states[1] ^= products[0]
    return states  # type: ignore[no-any-return]


def _to_gumbel_(words: Tensor) -> Tensor:
    """Overwrites words with their noise, float32 of any shape."""
    return words.add_(0.5).mul_(-CELL).log1p_().neg_().log_().neg_()
