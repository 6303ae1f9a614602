"""What drafting should gain, by formula."""

import pytest

from decoding.pace import expected_tokens, expected_tokens_by_position, predicted_speedup


@pytest.mark.parametrize("depth", [0, 1, 4, 8])
def test_the_limits_are_one_token_and_all_of_them(depth: int) -> None:
    assert expected_tokens(0.0, depth) == 1.0
    assert expected_tokens(1.0, depth) == depth + 1


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_expected_tokens_is_the_closed_formula(rate: float) -> None:
    assert expected_tokens(rate, 5) == pytest.approx((1 - rate**6) / (1 - rate))


def test_rates_by_position_multiply() -> None:
    assert expected_tokens_by_position([0.5, 0.4]) == pytest.approx(1 + 0.5 + 0.2)


def test_drafting_that_costs_more_than_it_gains_slows_down() -> None:
    assert predicted_speedup(0.3, 4, draft_cost=0.3) < 1.0 < predicted_speedup(0.9, 4, draft_cost=0.05)
    assert predicted_speedup(0.8, 0, draft_cost=0.3) == 1.0


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="acceptance rate"):
        expected_tokens(rate, 2)
