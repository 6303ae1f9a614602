"""Keyed Gumbel noise: a function of noise key, position and token, without state.

A token's 32 random bits, identical on every device and in every batch, are two halves of 16 from different
Philox streams. The high halves alone bound the noise of a whole vocabulary from above at half the cost. Then
exact noise is computed for the few tokens that might win. Floating-point steps stay within 2 ulp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.philox import MULTIPLIERS, WORD, Purpose, round_keys

_HALF_BITS = 16
_TOKENS_PER_BLOCK = 8  # tokens of a Philox block: 128 bits
_BLOCKS_AT_ONCE = 2**17  # blocks; the data in work then fits the second-level caches of two cores
# A hair under 2^-32: the largest words round up to 2^32, whose product with it is below 1.
CELL = 2.0**-32 * (1 - 2.0**-24)
_BELOW = 1 - 2.0**-16  # more than rounding can make up for
_LEAST = 2.0**-34  # below v if the high half is 0


def gumbel(
    keys: Sequence[int],  # [num_rows] unsigned 64-bit noise keys
    positions: Sequence[int],  # [num_rows]
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns standard Gumbel noise, float32 [num_rows, vocab_size].

    It is -log(-log(1 - v)) with v = (word + 0.5) / 2^32. The likely winners of argmax(logits + noise) have
    small v, for which float32 keeps all 32 bits of the word.
    """
    high = _halves(keys, positions, Purpose.CHOICE_HIGH, vocab_size, device)
    low = _halves(keys, positions, Purpose.CHOICE_LOW, vocab_size, device)
    return _to_gumbel_(high.mul_(2.0**_HALF_BITS).add_(low))


def gumbel_at(keys: Sequence[int], positions: Sequence[int], rows: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the values of gumbel() at (rows, token_ids), both int64 [num_pairs]: float32 [num_pairs]."""
    return _to_gumbel_(words_at(keys, positions, rows, token_ids).float())


def gumbel_bound(
    keys: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns an upper bound of gumbel() that is close if it is large: float32 [num_rows, vocab_size].

    The bound is -log(1 - v) >= v, with the high half of v alone.
    """
    bound = _halves(keys, positions, Purpose.CHOICE_HIGH, vocab_size, device)
    return bound.mul_(2.0**-_HALF_BITS * _BELOW).add_(_LEAST).log_().neg_()


def words_at(keys: Sequence[int], positions: Sequence[int], rows: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the tokens' 32 random bits: int64 [num_pairs].

    The high half of token 8k + j is the j-th group of 16 bits of the Philox block with the counter
    (k, position, 0, CHOICE_HIGH), its words lined up as second, first, fourth, third, lowest bits first. The
    low half is found in the same way under CHOICE_LOW.
    """
    purposes = (Purpose.CHOICE_HIGH, Purpose.CHOICE_LOW)
    streams = torch.stack([_streams(keys, positions, purpose, rows.device)[rows] for purpose in purposes])
    left, right = _philox(streams, token_ids // _TOKENS_PER_BLOCK)
    group = token_ids % _TOKENS_PER_BLOCK
    lanes = torch.where(group < 4, left, right)
    high, low = (lanes >> group % 4 * _HALF_BITS).bitwise_and_(2**_HALF_BITS - 1)
    words: Tensor = high << _HALF_BITS | low
    return words


def _halves(
    keys: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    vocab_size: int,
    device: torch.device | str,
) -> Tensor:
    """Returns 16 bits of each token as an integer: float32 [num_rows, vocab_size]."""
    streams = _streams(keys, positions, purpose, device)
    num_blocks = -(-vocab_size // _TOKENS_PER_BLOCK)
    halves = torch.empty(len(keys), num_blocks * _TOKENS_PER_BLOCK, device=device)
    step = num_blocks if halves.is_cuda else max(1, _BLOCKS_AT_ONCE // max(1, len(keys)))
    for start in range(0, num_blocks, step):
        blocks = torch.arange(start, min(start + step, num_blocks), device=device)
        tile = torch.stack(_philox(streams[:, None], blocks), dim=-1).view(torch.uint16).flatten(1)
        begin = start * _TOKENS_PER_BLOCK
        halves[:, begin : begin + tile.shape[1]] = tile
    return halves[:, :vocab_size]


def _streams(
    keys: Sequence[int], positions: Sequence[int], purpose: Purpose, device: torch.device | str
) -> Tensor:
    """Returns the state of Philox for each row, whatever the token: int64 [num_rows, 2 * ROUNDS].

    Two counter words are packed into an int64, the first in the high half, so that a 64-bit product is the
    next pair. Of the first round only the product with the token is missing here.
    """
    table = []
    for key, position in zip(keys, positions, strict=True):
        (low_key, high_key), *later = round_keys(key)
        packed = [position ^ low_key, purpose ^ high_key, *(word for pair in later for word in pair)]
        table.append([_signed(word << 32) for word in packed])
    return torch.tensor(table, dtype=torch.int64, device=device).reshape(len(keys), -1)


def _philox(streams: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each block as words (first, second) and (third, fourth), packed as in streams: int64."""
    left, right, left_key, right_key, *keys = streams.unbind(-1)
    right = right ^ blocks * MULTIPLIERS[0]
    left, right = (
        _high(right).mul_(MULTIPLIERS[1]).bitwise_xor_(left << 32 ^ left_key),
        (right << 32).bitwise_xor_(_high(left).mul_(MULTIPLIERS[0]).bitwise_xor_(right_key)),
    )
    # In place from here on: passes over memory, and finding memory, are the cost.
    from_left, from_right = torch.empty_like(left), torch.empty_like(right)
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        torch.bitwise_right_shift(left, 32, out=from_left).bitwise_and_(WORD).mul_(MULTIPLIERS[0])
        torch.bitwise_right_shift(right, 32, out=from_right).bitwise_and_(WORD).mul_(MULTIPLIERS[1])
        from_right.bitwise_xor_(left.bitwise_left_shift_(32).bitwise_xor_(left_key))
        from_left.bitwise_xor_(right.bitwise_left_shift_(32).bitwise_xor_(right_key))
        left, right, from_left, from_right = from_right, from_left, left, right
    return left, right


def _to_gumbel_(words: Tensor) -> Tensor:
    """Overwrites words with their noise, float32 of any shape."""
    return words.add_(0.5).mul_(-CELL).log1p_().neg_().log_().neg_()


def _high(packed: Tensor) -> Tensor:
    return (packed >> 32).bitwise_and_(WORD)


def _signed(word: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return word - (word >> 63 << 64)
