"""When a step waits for company, by a clock that the test moves."""

import pytest

from outrider.engine.scheduling.batch_delay import MARGIN, BatchDelay
from outrider.pace.step import Step, StepSize


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gathering_of(clock: Clock, read: float, token: float, absence: float) -> BatchDelay:
    """One that knows what steps cost, and for how long sequences are usually away."""
    batch_delay = BatchDelay(clock)
    for number in range(1, 200):
        tokens = 1 + number % 100
        batch_delay.stepped(Step(number, StepSize(1, tokens), read + token * tokens))
    for _ in range(50):
        batch_delay.answered(["any"])
        clock.now += absence
        batch_delay.returned("any", clock.now)
    return batch_delay


def test_cheap_step_waits_for_a_sequence_that_is_nearly_there(clock):
    batch_delay = gathering_of(clock, read=40e-3, token=0.1e-3, absence=8e-3)
    batch_delay.answered(["a", "b"])
    clock.now += 6e-3
    assert batch_delay.patience([5]) == pytest.approx(2e-3 + MARGIN * 8e-3, rel=0.1)


def test_step_that_costs_by_the_token_does_not_wait(clock):
    batch_delay = gathering_of(clock, read=1e-3, token=2e-3, absence=8e-3)
    batch_delay.answered(["a", "b"])
    clock.now += 6e-3
    assert batch_delay.patience([5]) == 0.0


def test_step_does_not_wait_for_a_draft_that_takes_longer(clock):
    batch_delay = gathering_of(clock, read=10e-3, token=0.1e-3, absence=50e-3)
    batch_delay.answered(["a"])
    clock.now += 5e-3
    assert batch_delay.patience([5]) == 0.0


def test_step_waits_for_no_sequence_for_ever(clock):
    batch_delay = gathering_of(clock, read=40e-3, token=0.1e-3, absence=8e-3)
    batch_delay.answered(["a"])
    clock.now += 12e-3
    assert 0.0 < batch_delay.patience([5]) < 2e-3 + MARGIN * 8e-3
    clock.now += 8e-3
    assert batch_delay.patience([5]) == 0.0


def test_step_does_not_wait_for_sequences_that_came_or_left(clock):
    batch_delay = gathering_of(clock, read=40e-3, token=0.1e-3, absence=8e-3)
    batch_delay.answered(["a", "b"])
    batch_delay.returned("a", clock.now)
    batch_delay.left("b")
    assert batch_delay.patience([5]) == 0.0


def test_step_does_not_wait_before_costs_are_known(clock):
    batch_delay = BatchDelay(clock)
    batch_delay.answered(["a"])
    assert batch_delay.patience([5]) == 0.0
