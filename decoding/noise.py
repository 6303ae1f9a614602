"""Keyed noise: each random number is a function of (noise key, position, token, round, purpose), of no state.

The random words are those of decoding.philox, identical on every device and in every batch; the
floating-point steps after them stay within 2 ulp.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decoding.philox import MULTIPLIERS, WORD, Purpose, round_keys

_WORDS_PER_BLOCK = 4
_BLOCKS_AT_ONCE = 2**16  # keeps a tile's working set in the second-level caches of two cores
_CELL = 2.0**-32 * (
    1 - 2.0**-24
)  # a hair under 2^-32: the largest words round up to 2^32, times this is below 1


def gumbel(
    keys: Sequence[int],  # [num_rows] unsigned 64-bit noise keys
    positions: Sequence[int],  # [num_rows]
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """float32 [num_rows, vocab_size]: standard Gumbel noise, -log(-log(1 - v)) with v = (word + 0.5) / 2^32.

    The likely winners of argmax(logits + noise) have small v, where float32 keeps all 32 bits of the word.
    """
    noise = torch.empty(len(keys), _padded(vocab_size), device=device)
    for span, tile in _tiles(_streams(keys, positions, device), vocab_size):
        _gumbel_(noise[:, span].copy_(tile))
    return noise[:, :vocab_size]


def gumbel_at(
    keys: Sequence[int],  # [num_rows]
    positions: Sequence[int],  # [num_rows]
    rows: Tensor,  # int64 [num_pairs]
    token_ids: Tensor,  # int64 [num_pairs]
) -> Tensor:
    """float32 [num_pairs]: the elements (rows, token_ids) of gumbel(), without computing the rest."""
    left, right = _philox(_streams(keys, positions, rows.device)[rows], token_ids // _WORDS_PER_BLOCK)
    lane = torch.where(token_ids % 4 < 2, left, right)
    return _gumbel_(torch.where(token_ids % 2 == 0, lane & WORD, _high(lane)).float())


def words(
    keys: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """uint32 [num_rows, vocab_size]: the random words behind gumbel().

    Token 4k + j has word (1, 0, 3, 2)[j] of the Philox block with the counter (k, position, 0, CHOICE).
    """
    tiles = [tile for _, tile in _tiles(_streams(keys, positions, device), vocab_size)]
    return torch.cat(tiles, dim=1)[:, :vocab_size]


def _streams(keys: Sequence[int], positions: Sequence[int], device: torch.device | str) -> Tensor:
    """int64 [num_rows, 2 * ROUNDS]: what Philox needs of each row, whatever the token.

    Two counter words are packed into an int64, the first in the high half, so that a 64-bit product is the
    next pair. Of the first round only the product with the token is missing here.
    """
    table = []
    for key, position in zip(keys, positions, strict=True):
        (low_key, high_key), *later = round_keys(key)
        packed = [position ^ low_key, Purpose.CHOICE ^ high_key, *(word for pair in later for word in pair)]
        table.append([_signed(word << 32) for word in packed])
    return torch.tensor(table, dtype=torch.int64, device=device).reshape(len(keys), -1)


def _tiles(streams: Tensor, vocab_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Spans of tokens and their words, uint32 [num_rows, span]; the last span is padded to a whole block."""
    num_blocks = _padded(vocab_size) // _WORDS_PER_BLOCK
    step = num_blocks if streams.is_cuda else max(1, _BLOCKS_AT_ONCE // max(1, len(streams)))
    for start in range(0, num_blocks, step):
        blocks = torch.arange(start, min(start + step, num_blocks), device=streams.device)
        tile = torch.stack(_philox(streams[:, None], blocks), dim=-1).view(torch.uint32).flatten(1)
        yield slice(start * _WORDS_PER_BLOCK, start * _WORDS_PER_BLOCK + tile.shape[1]), tile


def _philox(streams: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Words (1, 0) and (3, 2) of each block, low half first; int64 of the shape of blocks and streams."""
    left, right, *keys = streams.unbind(-1)
    right = right ^ blocks * MULTIPLIERS[0]
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left_product = _high(left).mul_(MULTIPLIERS[0])
        right_product = _high(right).mul_(MULTIPLIERS[1])
        # In place where it can be: passes over memory are what this costs.
        left = right_product.bitwise_xor_((left << 32).bitwise_xor_(left_key))
        right = right.bitwise_left_shift_(32).bitwise_xor_(right_key).bitwise_xor_(left_product)
    return left, right


def _gumbel_(words: Tensor) -> Tensor:
    """Overwrites words, float32 of any shape, by their Gumbel noise."""
    return words.add_(0.5).mul_(-_CELL).log1p_().neg_().log_().neg_()


def _high(packed: Tensor) -> Tensor:
    return (packed >> 32).bitwise_and_(WORD)


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return word - (word >> 63 << 64)


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _WORDS_PER_BLOCK) * _WORDS_PER_BLOCK
