"""Poisson's distribution."""

import pytest
from scipy.stats import poisson

from outrider.learning.poisson import at_least


@pytest.mark.parametrize(("count", "expected"), [(0, 2.0), (1, 0.5), (5, 1.0), (20, 12.5), (3, 0.0)])
def test_probability_of_at_least_so_many_events_is_that_of_scipy(count: int, expected: float) -> None:
    assert at_least(count, expected) == pytest.approx(poisson.sf(count - 1, expected), abs=1e-12)
