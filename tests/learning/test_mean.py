"""Exponential means, compared with sums written out."""

import pytest

from outrider.learning.mean import Mean, Rate, kept


def test_kept_after_one_memory_is_near_one_over_e() -> None:
    assert kept(200.0, 200.0) == pytest.approx(0.3679, abs=1e-3)


def test_kept_memory_of_one_keeps_nothing() -> None:
    assert kept(1.0) == 0.0


def test_mean_observe_moves_by_one_over_memory_of_the_difference() -> None:
    mean = Mean(1.0, memory=10.0)
    mean.observe(2.0)
    assert mean.value == pytest.approx(1.1)


def test_mean_observe_of_several_equals_single_ones() -> None:
    together, apart = Mean(0.0, memory=10.0), Mean(0.0, memory=10.0)
    together.observe(1.0, observations=3)
    for _ in range(3):
        apart.observe(1.0)
    assert together.value == pytest.approx(apart.value)


def test_mean_observe_of_none_changes_nothing() -> None:
    mean = Mean(0.5, memory=10.0)
    mean.observe(1.0, observations=0)
    assert mean.value == 0.5


def test_rate_observe_weighs_older_observations_less() -> None:
    rate = Rate(memory=2.0)
    rate.observe(1, 1)
    rate.observe(0, 1)
    assert rate.value(prior=0.0) == pytest.approx(0.5 / 1.5)


def test_rate_value_without_observations_is_the_prior() -> None:
    assert Rate(memory=2.0).value(prior=0.7) == 0.7


def test_rate_value_adds_the_prior_by_its_weight() -> None:
    rate = Rate(memory=100.0)
    rate.observe(2, 2)
    assert rate.value(prior=0.0, weight=2.0) == 0.5


def test_rate_observe_of_nothing_keeps_the_ratio_and_loses_weight() -> None:
    rate = Rate(memory=2.0)
    rate.observe(1, 2)
    rate.observe(0, 0)
    assert rate.value(prior=0.0) == 0.5
    assert rate.total == 1.0
