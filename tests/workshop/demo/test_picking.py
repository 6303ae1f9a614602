"""Random choices with a favourite."""

from collections import Counter
from random import Random

from workshop.demo.picking import EvenRandom, pick, pick_number


def test_earlier_options_are_picked_more_often() -> None:
    random = Random(0)
    counts = Counter(pick(random, "abcd") for _ in range(4000))
    assert counts["a"] > 1.5 * counts["b"] > counts["c"] > counts["d"] > 0


def test_numbers_cover_the_range_with_both_ends() -> None:
    random = Random(0)
    assert {pick_number(random, 2, 5) for _ in range(200)} == {2, 3, 4, 5}


def test_even_picks_have_no_favourite() -> None:
    random = EvenRandom(0)
    counts = Counter(pick(random, "abcd") for _ in range(4000))
    assert max(counts.values()) < 1.2 * min(counts.values())
