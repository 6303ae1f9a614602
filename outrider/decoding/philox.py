"""Philox 4x32, a counter-based random number generator, in plain integers. Torch-free.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
Seven rounds are the fewest that pass all of BigCrush there (table 2); ten, the default of the paper, are a
margin that costs two fifths more and that the choice of tokens does not need.
"""

from enum import IntEnum

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 2**32 - 1  # the bits of a word


class Purpose(IntEnum):
    """What a random number decides; numbers of different purposes are independent."""

    CHOICE_HIGH = 0  # the coupled rule: noise that the target and every drafter share, round 0
    CHOICE_LOW = 1
    DRAFT = 2  # rejection sampling and block verification from here on, keyed by round as well
    ACCEPT = 3
    RESIDUAL = 4  # the target's own token, which ends a round


def uniform(key: int, position: int, round: int, purpose: Purpose) -> float:
    """A number in (0, 1) from 51 random bits: the midpoint of one of 2^51 equal cells.

    With 51 bits its product with any float is less than that float, also after rounding.
    """
    first, second, _, _ = philox((0, position, round, purpose), key)
    return ((first << 19 | second >> 13) + 0.5) * 2.0**-51


def philox(counter: tuple[int, int, int, int], key: int, rounds: int = ROUNDS) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter of four 32-bit words and an unsigned 64-bit key."""
    first, second, third, fourth = counter
    for low_key, high_key in round_keys(key, rounds):
        left = first * MULTIPLIERS[0]
        right = third * MULTIPLIERS[1]
        first, second = right >> 32 ^ second ^ low_key, right & WORD
        third, fourth = left >> 32 ^ fourth ^ high_key, left & WORD
    return first, second, third, fourth


def round_keys(key: int, rounds: int = ROUNDS) -> list[tuple[int, int]]:
    """[rounds] pairs of 32-bit words, the first of the low half of the key."""
    low, high = key & WORD, key >> 32
    return [(low + n * KEY_STEPS[0] & WORD, high + n * KEY_STEPS[1] & WORD) for n in range(rounds)]
