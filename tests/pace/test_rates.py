"""Tokens per second that the pace expects of plain decoding and of drafters."""

import random

import pytest

from outrider.pace.step import Step, StepSize
from tests.support.paced_service import Service


def test_plain_rate_is_computed_from_costs():
    service = Service(streams=4)
    assert service.pace.plain_rate(4) is None
    service.run(60)
    assert service.pace.plain_rate(0) == 0
    assert service.pace.plain_rate(4) == pytest.approx(4 / 15e-3, rel=0.1)


def test_plain_rate_before_any_step_has_decoded_is_unknown():
    """Prompts alone fit to a cost that says nothing of decoding."""
    service = Service()
    for number in range(1, 40):
        prompt = 2 ** (number % 10)
        service.pace.observe_target(Step(number, StepSize(1, 0, prompt), 1e-5 * prompt**1.5), running=1)
        service.pace.refresh()
        assert service.pace.plain_rate(1) is None
    service.steps = 40
    for _ in range(1000):
        service.run(1)
        assert service.pace.plain_rate(1) is None or service.pace.plain_rate(1) < 3 / 15e-3
    assert service.pace.plain_rate(1) == pytest.approx(1 / 15e-3, rel=0.25)


def test_plain_rate_of_a_restless_machine_swings_less_than_its_steps():
    """One fit follows the latest fifty steps; ten seconds of them are published."""
    service, drawn = Service(), random.Random(0)
    published, fits = [], []
    for number in range(1, 3000):
        seconds = 7e-3 * drawn.lognormvariate(0.0, 0.7)
        service.pace.observe_target(Step(number, StepSize(1, 1, 0, 50), seconds), running=1)
        service.pace.refresh()
        if number > 1500:
            published.append(service.pace.plain_rate(1))
            fits.append(1 / service.pace._costs._target.measured(1, 50))
    assert max(published) / min(published) < 1.3 < 1.8 < max(fits) / min(fits)


def test_rate_after_sequences_in_rounds_have_left_counts_plain_steps_as_such():
    """They still count as in rounds until the next decision."""
    service = Service(streams=6)
    for sequence in service.sequences[:2]:
        sequence.max_depth = 0
    service.run(100)
    service.resize(2)
    pace, drafter = service.pace, service.drafter
    before = pace.rate(drafter, [0.8] * 4, 4)
    for _ in range(20):
        pace.observe_plain(service.sequences[0], 0.1)  # many times as long as its step
    assert pace.rate(drafter, [0.8] * 4, 4) >= before


def test_rate_of_two_workers_is_higher_than_of_one_with_all_sequences():
    """A token of a sequence takes the draft half a millisecond, so two workers draft faster than one."""

    def rate(*workers: str) -> float:
        service = Service(streams=16)
        for number, sequence in enumerate(service.sequences):
            sequence.worker = workers[number % len(workers)]
        drawn = random.Random(0)
        for number in range(1, 200):
            size = drawn.choice([1, 2, 4, 8, 16])
            for sequence in service.sequences[: len(workers)]:
                step = Step(number, StepSize(size, size), 2e-3 + 0.5e-3 * size)
                service.pace.observe_drafting(sequence, step)
        service.run(100)
        return service.pace.rate(service.drafter, [0.8] * 8, 8)

    assert rate("first", "second") > 1.1 * rate("only")


def test_rate_of_a_sequence_without_worker_counts_at_a_known_worker():
    """Or a crowd would look like two workers with half of it each."""

    def rate(known: int) -> float:
        service = Service(streams=16)
        for sequence in service.sequences[:known]:
            sequence.worker = "only"
        drawn = random.Random(0)
        for number in range(1, 200):
            size = drawn.choice([1, 2, 4, 8, 16])
            step = Step(number, StepSize(size, size), 2e-3 + 0.5e-3 * size)
            service.pace.observe_drafting(service.sequences[0], step)
        for number in range(1, 60):
            service.pace.observe_target(Step(number, StepSize(16, 16), 15e-3), running=16)
        return service.pace.rate(service.drafter, [0.8] * 8, 8)

    assert rate(8) == rate(16)


def test_rate_ignores_slow_workers_of_other_sequences():
    service = Service(streams=2)
    fast, slow = service.sequences
    fast.worker, slow.worker = "fast", "slow"
    service.run(100)
    service.resize(1)
    before = service.pace.rate(service.drafter, [0.8] * 4, 4)
    for number in range(1, 100):
        service.pace.observe_drafting(slow, Step(number, StepSize(1, 1), 50e-3))
    assert service.pace.rate(service.drafter, [0.8] * 4, 4) == before
