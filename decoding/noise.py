"""Keyed noise: each random number is a function of (noise key, position, token, round, purpose), of no state.

The random words are those of decoding.philox, identical on every device and in every batch; the
floating-point steps after them stay within 2 ulp.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from decoding.philox import MULTIPLIERS, ROUNDS, WORD, philox, round_keys

_WORDS_PER_BLOCK = 4
_BLOCKS_AT_ONCE = 2**16  # keeps a tile's working set in the second-level caches of two cores
_CELL = 2.0**-32 * (
    1 - 2.0**-24
)  # a hair under 2^-32: the largest words round up to 2^32 and must stay below 1


class Purpose(IntEnum):
    """What a random number decides; numbers of different purposes are independent."""

    CHOICE = 0  # the coupled rule: shared by the target and every drafter, round 0
    DRAFT = 1  # the ratio rules, keyed by round too, from here on
    ACCEPT = 2
    RESIDUAL = 3  # the target's own token, which ends a round


def uniform(key: int, position: int, round: int, purpose: Purpose) -> float:
    """A number in (0, 1) from 52 random bits: the midpoint of one of 2^52 equal cells."""
    first, second, _, _ = philox((0, position, round, purpose), key)
    return ((first << 20 | second >> 12) + 0.5) * 2.0**-52


def words(streams: Tensor, vocab_size: int) -> Tensor:
    """uint32 [num_rows, vocab_size] on the device of ``streams``, which streams() makes.

    Token 4k + j has word (1, 0, 3, 2)[j] of the Philox block with the counter (k, position, round, purpose).
    """
    return torch.cat([tile for _, tile in _tiles(streams, vocab_size)], dim=1)[:, :vocab_size]


def gumbel(streams: Tensor, vocab_size: int) -> Tensor:
    """float32 [num_rows, vocab_size]: standard Gumbel noise, -log(-log(1 - v)) with v = (word + 0.5) / 2^32.

    The likely winners of argmax(logits + noise) have small v, where float32 keeps all 32 bits of the word.
    """
    noise = torch.empty(len(streams), _padded(vocab_size), device=streams.device)
    for span, tile in _tiles(streams, vocab_size):
        _gumbel_(noise[:, span].copy_(tile))
    return noise[:, :vocab_size]


def gumbel_at(streams: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [num_pairs]: gumbel() at (rows, token_ids), both int64 [num_pairs], without the rest of it."""
    left, right = _philox(streams[rows], token_ids // _WORDS_PER_BLOCK)
    lane = torch.where(token_ids % 4 < 2, left, right)
    word = torch.where(token_ids % 2 == 0, lane & WORD, _high(lane))
    return _gumbel_(word.to(torch.float32))


def streams(
    keys: Sequence[int],  # [num_rows] unsigned 64-bit noise keys
    positions: Sequence[int],  # [num_rows]
    rounds: Sequence[int],  # [num_rows]
    purpose: Purpose,
    device: torch.device | str = "cpu",
    philox_rounds: int = ROUNDS,
) -> Tensor:
    """int64 [num_rows, 2 * philox_rounds]: what Philox needs of each row, whatever the token.

    Two counter words, (token // 4, position) and (round, purpose), are packed into an int64 each, so that a
    64-bit product is the next high and low word at once. Of the first Philox round only the product with the
    token is missing here.
    """
    table = []
    for key, position, round in zip(keys, positions, rounds, strict=True):
        (low_key, high_key), *later = round_keys(key, philox_rounds)
        row = [round * MULTIPLIERS[1] ^ (position ^ low_key) << 32, (purpose ^ high_key) << 32]
        table.append(row + [word << 32 for pair in later for word in pair])
    return torch.tensor([[_signed(word) for word in row] for row in table], device=device).reshape(
        len(keys), -1
    )


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
        # In place, because in caches the passes over memory are what costs.
        left = right_product.bitwise_xor_((left << 32).bitwise_xor_(left_key))
        right = right.bitwise_left_shift_(32).bitwise_xor_(right_key).bitwise_xor_(left_product)
    return left, right


def _gumbel_(words: Tensor) -> Tensor:
    """Overwrites words, float32 of any shape, by their Gumbel noise."""
    return words.add_(0.5).mul_(-_CELL).log1p_().neg_().log_().neg_()


def _high(packed: Tensor) -> Tensor:
    return (packed >> 32).bitwise_and_(WORD)


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of ``word``."""
    word &= 2**64 - 1
    return word - (word >> 63 << 64)


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _WORDS_PER_BLOCK) * _WORDS_PER_BLOCK
