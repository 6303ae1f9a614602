"""Philox against the published vectors, and the uniform numbers made of it."""

import pytest
from scipy.stats import chisquare

from outrider.decoding.philox import Purpose, philox, uniform

ONES = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0_A4093822)

# The kat_vectors file of Random123 (D. E. Shaw Research), the lines of philox4x32.
KNOWN_ANSWERS = [
    (7, (0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_returns_the_known_answers(
    rounds: int, counter: tuple[int, int, int, int], key: int, words: tuple[int, ...]
) -> None:
    assert philox(counter, key, rounds) == words


def test_uniform_returns_numbers_of_uniform_distribution() -> None:
    counts = [0] * 16
    for position in range(4000):
        counts[int(uniform(7, position, 0, Purpose.ACCEPT) * 16)] += 1
    assert chisquare(counts).pvalue > 1e-4


def test_uniform_numbers_depend_on_everything_they_are_keyed_by() -> None:
    numbers = [
        uniform(key, position, number, purpose)
        for key in (0, 1)
        for position in (0, 1)
        for number in (0, 1)
        for purpose in Purpose
    ]
    assert len(set(numbers)) == len(numbers)


def test_uniform_number_never_reaches_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (0, ONES):
        monkeypatch.setattr("outrider.decoding.philox.philox", lambda counter, key, word=word: (word,) * 4)
        number = uniform(0, 0, 0, Purpose.ACCEPT)
        assert 0.0 < number < 1.0
        assert number * 0.3 < 0.3
