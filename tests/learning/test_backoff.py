"""Delays that double."""

import pytest

from outrider.learning.backoff import Backoff


@pytest.mark.parametrize(("failures", "delay"), [(0, 0.2), (1, 0.4), (3, 1.6), (4, 3.0), (10_000, 3.0)])
def test_backoff_after_failures_doubles_up_to_the_longest(failures: int, delay: float) -> None:
    assert Backoff(0.2, 3.0).after(failures) == delay
