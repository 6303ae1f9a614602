"""Philox 4x32, a counter-based random number generator in plain integers, and its keys. Torch-free.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
Seven rounds are the fewest that pass all of BigCrush (table 2 there). The paper's default of ten rounds has a
margin that costs two fifths more, and that the choice of tokens does not need.
"""

import hashlib
from array import array
from collections.abc import Sequence
from enum import IntEnum

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 2**32 - 1  # mask of a 32-bit word
_PERSON = b"outrider.noise"  # separates the noise key from other uses of the same hash


class Purpose(IntEnum):
    """Purpose of a random number; numbers of different purposes are independent."""

    CHOICE_HIGH = 0  # coupled verification: noise that the target and all drafters share, at round 0
    CHOICE_LOW = 1
    DRAFT = 2  # from here on: rejection sampling and block verification, keyed by round too
    ACCEPT = 3
    RESIDUAL = 4  # the target's own token, which ends a round


def noise_key(seed: int, choice: int, prompt: Sequence[int]) -> int:
    """Returns the key of a generation's random numbers: a hash of its arguments, an unsigned 64-bit integer.

    So different prompts with the same seed, and the choices of one request, get unrelated noise.

    Args:
        choice: index of the choice in its request.
        prompt: token ids; empty if all prompts share the noise.
    """
    key = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    tokens = array("q", prompt)
    digest = hashlib.blake2b(tokens.tobytes(), key=key, person=_PERSON, digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def uniform(key: int, position: int, round: int, purpose: Purpose) -> float:
    """Returns a number in (0, 1) from 51 random bits: the midpoint of one of 2^51 equal cells.

    With 51 bits, its product with any positive float is less than that float, even after rounding.
    """
    first, second, _, _ = philox((0, position, round, purpose), key)
    return ((first << 19 | second >> 13) + 0.5) * 2.0**-51


def philox(counter: tuple[int, int, int, int], key: int, rounds: int = ROUNDS) -> tuple[int, int, int, int]:
    """Returns four random 32-bit words for a counter of four 32-bit words and an unsigned 64-bit key."""
    first, second, third, fourth = counter
    for low_key, high_key in round_keys(key, rounds):
        left = first * MULTIPLIERS[0]
        right = third * MULTIPLIERS[1]
        first, second = right >> 32 ^ second ^ low_key, right & WORD
        third, fourth = left >> 32 ^ fourth ^ high_key, left & WORD
    return first, second, third, fourth


def round_keys(key: int, rounds: int = ROUNDS) -> list[tuple[int, int]]:
    """Returns the keys of the rounds: [rounds] pairs of 32-bit words, the low half of the key first."""
    low, high = key & WORD, key >> 32
    return [(low + n * KEY_STEPS[0] & WORD, high + n * KEY_STEPS[1] & WORD) for n in range(rounds)]
