"""The test of distributions: exact where nothing differs, and as keen as it says where something does."""

from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2, hypergeom, ncx2

from workshop.checking.two_sample import Tokens, smallest_distance, two_sample_test

FALSE_ALARM = 0.05
TOKENS = ["a", "b", "c", "d", "e"]
PROBS = np.array([0.3, 0.3, 0.2, 0.1, 0.1])
UP = np.array([True, False, True, False, False])  # half of the mass


def texts(
    probs: NDArray[np.float64], count: int, length: int, generator: np.random.Generator
) -> list[Tokens]:
    return [tuple(generator.choice(TOKENS, size=length, p=probs)) for _ in range(count)]


def share_called_different(shift: float, runs: int = 100) -> float:
    """Returns the share of sample pairs called different, with B's tokens ``shift`` away from A's."""
    moved = np.where(UP, PROBS * (1 + 2 * shift), PROBS * (1 - 2 * shift))
    called = 0
    for run in range(runs):
        generator = np.random.default_rng(run)
        samples = [(texts(PROBS, 60, 2, generator), texts(moved, 60, 2, generator)) for _ in range(3)]
        called += two_sample_test(samples, FALSE_ALARM, run, permutations=199).p_value <= FALSE_ALARM
    return called / runs


def test_deployments_that_are_the_same_are_called_different_as_rarely_as_promised() -> None:
    assert share_called_different(0.0) < 0.12  # 0.05 expected at most, 0.02 standard deviation


def test_distance_that_is_told_is_found() -> None:
    generator = np.random.default_rng(0)
    samples = [(texts(PROBS, 60, 2, generator), texts(PROBS, 60, 2, generator)) for _ in range(3)]
    distance = two_sample_test(samples, FALSE_ALARM, 0).distance
    assert distance is not None
    moved = np.where(UP, PROBS * (1 + 2 * distance), PROBS * (1 - 2 * distance))
    assert abs(moved - PROBS).sum() / 2 == pytest.approx(distance)
    assert share_called_different(distance) > 0.8  # 0.9 expected, 0.03 standard deviation
    assert share_called_different(distance / 2, 50) < 0.6


@pytest.mark.parametrize(("degrees", "tables"), [(30, 5), (128, 16), (1000, 60)])
def test_distance_agrees_with_the_noncentral_chi_square(degrees: int, tables: int) -> None:
    shuffled = np.random.default_rng(1).chisquare(degrees, 200_000)
    distance = smallest_distance(shuffled, weight=tables * 64.0, false_alarm=1e-3)
    shift = 4 * distance**2 * tables * 64.0
    assert ncx2.sf(chi2.ppf(1 - 1e-3, degrees), degrees, shift) == pytest.approx(0.9, abs=0.02)


def test_p_value_is_that_of_all_ways_to_shuffle() -> None:
    a, b = [("x",)] * 9 + [("y",)] * 3, [("x",)] * 4 + [("y",)] * 8
    # Of the 13 texts "x", A could have any number, by chance 6.5; it has 9.
    as_far = hypergeom.cdf(4, 24, 13, 12) + hypergeom.sf(8, 24, 13, 12)
    # Of one table both statistics say the same, and the p-value allows for two.
    assert two_sample_test([(a, b)], FALSE_ALARM, 0).p_value == pytest.approx(2 * as_far, abs=0.02)


def test_two_sample_test_finds_a_difference_in_one_place_of_many() -> None:
    generator = np.random.default_rng(3)
    samples = [(texts(PROBS, 60, 8, generator), texts(PROBS, 60, 8, generator)) for _ in range(8)]
    assert two_sample_test(samples, FALSE_ALARM, 0).p_value > FALSE_ALARM
    off = [("a", *text[1:]) if place < 50 else text for place, text in enumerate(samples[5][1])]
    samples[5] = (samples[5][0], off)
    found = two_sample_test(samples, FALSE_ALARM, 0)
    assert found.p_value <= 1e-3
    assert (found.most_moved[0].prompt, found.most_moved[0].position) == (5, 0)


def test_two_sample_test_reports_the_cells_that_moved_most() -> None:
    a = [("x", "same")] * 30 + [("y", "same")] * 10
    b = [("x", "same")] * 10 + [("y", "same")] * 30
    found = two_sample_test([([("z",)] * 40, [("z",)] * 40), (a, b)], FALSE_ALARM, 0)
    assert found.p_value <= 1e-3
    assert found.num_tables == 1
    assert {(moved.prompt, moved.position, moved.token, moved.a, moved.b) for moved in found.most_moved} == {
        (1, 0, "x", 30, 10),
        (1, 0, "y", 10, 30),
    }


def test_texts_that_end_earlier_are_another_outcome() -> None:
    found = two_sample_test([([("x", "y")] * 20, [("x",)] * 20)], FALSE_ALARM, 0)
    assert found.p_value <= 1e-3
    assert found.most_moved[0].position == 1


def test_rarer_tokens_count_together_and_all_the_same_count() -> None:
    """None of them is said twice, so no token by itself tells the deployments apart."""
    words = [str(number) for number in range(4000)]
    a = [(word,) for word in words if crc32(word.encode()) % 2][:200]
    b = [(word,) for word in words if not crc32(word.encode()) % 2][:200]
    assert two_sample_test([(a, b)], FALSE_ALARM, 0).p_value <= 1e-3
    assert two_sample_test([(a[::2], a[1::2])], FALSE_ALARM, 0).p_value > 1e-3


def test_two_sample_test_of_one_repeated_text_has_no_tables() -> None:
    found = two_sample_test([([("x",)] * 5, [("x",)] * 5)], FALSE_ALARM, 0)
    assert (found.p_value, found.num_tables, found.distance) == (1.0, 0, None)


def test_two_sample_test_repeats_its_p_value_with_the_seed() -> None:
    generator = np.random.default_rng(5)
    samples = [(texts(PROBS, 30, 3, generator), texts(PROBS, 40, 3, generator))]
    assert two_sample_test(samples, 0.01, 7) == two_sample_test(samples, 0.01, 7)


def test_prompt_without_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 0 has 1 texts of A and 0 of B"):
        two_sample_test([([("x",)], [])], FALSE_ALARM, 0)
