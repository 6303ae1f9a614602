"""Tail of the newest observations."""

from outrider.learning.tail import Tail


def tail_after(values: list[float]) -> float | None:
    tail = Tail(share=0.9, memory=20, renewed_after=10)
    for value in values:
        tail.observe(value)
    return tail.value


def test_tail_after_few_observations_is_unknown() -> None:
    assert tail_after([1.0] * 9) is None


def test_tail_is_the_least_value_that_the_share_does_not_exceed() -> None:
    assert tail_after([float(value) for value in range(1, 11)]) == 9.0


def test_tail_of_rare_large_values_ignores_them() -> None:
    assert tail_after([1.0] * 18 + [50.0] * 2) == 1.0


def test_tail_forgets_what_is_older_than_its_memory() -> None:
    assert tail_after([50.0] * 20 + [1.0] * 20) == 1.0
