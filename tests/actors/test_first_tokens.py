"""Tail of the times to first tokens."""

from types import SimpleNamespace

import pytest

from actors.first_tokens import RECENT_S, FirstTokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    times = [100.0]
    monkeypatch.setattr("actors.first_tokens.time", SimpleNamespace(monotonic=lambda: times[-1]))
    return times


@pytest.mark.parametrize(
    ("seconds", "tail"),
    [([], 0.0), ([3.0], 3.0), ([5.0, 1.0], 5.0), ([float(n) for n in range(1, 21)], 18.0)],
    ids=["none", "one", "two", "twenty"],
)
def test_tail_is_what_nine_of_ten_times_are_at_most(
    clock: list[float], seconds: list[float], tail: float
) -> None:
    times = FirstTokens()
    for each in seconds:
        times.add(each)
    assert times.tail() == tail


def test_tail_forgets_times_that_are_not_recent(clock: list[float]) -> None:
    times = FirstTokens()
    times.add(9.0)
    clock.append(clock[-1] + RECENT_S / 2)
    times.add(1.0)
    assert times.tail() == 9.0
    clock.append(clock[-1] + RECENT_S / 2 + 1.0)
    assert times.tail() == 1.0
