"""Expected tokens per round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.pace.acceptance import expected_tokens, expected_tokens_by_position, least_rate


@given(st.floats(0.0, 0.999), st.integers(0, 12))
def test_expected_tokens_is_the_closed_form(acceptance_rate: float, depth: int) -> None:
    closed = (1 - acceptance_rate ** (depth + 1)) / (1 - acceptance_rate)
    assert expected_tokens(acceptance_rate, depth) == pytest.approx(closed)


@pytest.mark.parametrize(
    ("acceptance_rate", "depth", "tokens"), [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 0, 1.0), (0.5, 1, 1.5)]
)
def test_expected_tokens_at_the_limits(acceptance_rate: float, depth: int, tokens: float) -> None:
    assert expected_tokens(acceptance_rate, depth) == tokens


@given(st.floats(0.0, 1.0), st.integers(1, 12))
def test_least_rate_brings_the_tokens_that_are_asked_for(acceptance_rate: float, depth: int) -> None:
    found = least_rate(expected_tokens(acceptance_rate, depth), depth)
    assert found == pytest.approx(acceptance_rate, abs=1e-3)


def test_least_rate_of_more_tokens_than_a_round_can_bring_is_none() -> None:
    assert least_rate(5.1, depth=4) is None
    assert least_rate(5.0, depth=4) == pytest.approx(1.0)


def test_expected_tokens_by_position_count_only_after_accepted_ones() -> None:
    assert expected_tokens_by_position([0.9, 0.5, 0.2]) == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    assert expected_tokens_by_position([0.0, 1.0, 1.0]) == 1.0


@pytest.mark.parametrize("acceptance_rate", [-0.1, 1.1, float("nan")])
def test_expected_tokens_rate_outside_0_and_1_is_refused(acceptance_rate: float) -> None:
    with pytest.raises(ValueError, match="acceptance rate"):
        expected_tokens(acceptance_rate, 3)


def test_expected_tokens_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=-1"):
        expected_tokens(0.5, -1)
