"""Long work says how far it is, and a candidate's work has an end."""

import pytest

from workshop.advice.progress import TELL_EVERY_S, HopelessError, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_reported_now_and_then() -> None:
    clock, told = Clock(), list[str]()
    progress = Progress(told.append, clock)
    for done in range(10):
        progress.at(done, 10, "tokens judged")
        clock.now += TELL_EVERY_S / 2
    assert told == [f"{done} of 10 tokens judged" for done in (2, 4, 6, 8)]


def test_progress_beyond_its_time_ends_the_work() -> None:
    clock = Clock()
    progress = Progress(lambda _: None, clock)
    clock.now += 1e6
    progress.at(1, 10, "tokens judged")  # nothing is said of how long it may take
    progress.allow(30.0)
    clock.now += 30.0
    progress.at(2, 10, "tokens judged")
    clock.now += 0.1
    with pytest.raises(HopelessError, match="after 30 s 3 of 10 tokens judged; --candidate-seconds"):
        progress.at(3, 10, "tokens judged")
    progress.allow(30.0)
    progress.at(0, 10, "tokens judged")
