"""What the pace gave up is tried again: trials, probes, calibration."""

import random

import pytest

from outrider.pace.settings import PaceSettings
from tests.support.paced_service import Service, mean


@pytest.mark.parametrize("rounds", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_pace_after_a_bad_hour_drafts_again_within_200_tokens(rounds):
    service = Service()
    service.rate = 0.02
    service.run(rounds)
    service.rate = 0.9
    assert max(service.run(200)) > 1
    assert mean(service.run(rounds // 2)[-200:]) > 2


def test_pace_uses_a_draft_again_that_was_slow():
    service = Service()
    service.run(100)
    service.draft_step = 60e-3
    service.run(600)
    assert mean(service.run(200)) < 0.2
    service.draft_step = 2e-3
    service.run(400)
    assert mean(service.run(100)) > 2


@pytest.mark.slow
def test_pace_tries_rounds_again_after_costly_steps():
    """Only trials show what Drafts would cost during plain decoding."""
    service = Service(streams=32)
    service.token = 1e-3
    service.run(300)
    assert mean(service.run(100)) < 0.2
    service.token = 0.02e-3
    trials = 6 * PaceSettings().trial_steps
    assert mean(service.run(trials)[-50:]) > 1


def test_pace_gives_up_rounds_slower_than_their_costs_and_tries_them_again():
    service = Service(streams=8)
    service.rate, service.waiting = 0.5, 0.8
    service.run(200)
    given_up = service.run(1000)
    assert mean(given_up) < 0.2
    assert max(given_up) > 1
    service.waiting = 0.0
    service.run(1000)
    assert mean(service.run(200)) > 1


@pytest.mark.slow
def test_pace_gives_up_a_drafter_whose_drafts_are_late_and_tries_it_again():
    """The few Drafts in time are good, and would make rounds look fast."""
    service = Service(streams=8)
    service.run(100)
    service.late = 0.9
    service.run(500)
    given_up = service.run(1000)
    assert mean(given_up) < 0.2
    assert max(given_up) > 1
    service.late = 0.0
    service.run(2000)
    assert mean(service.run(200)) > 1


@pytest.mark.slow
def test_pace_in_rounds_finds_out_that_the_draft_slows_the_target():
    """Only a trial of plain decoding shows it: each step was made while the draft ran."""
    service = Service(streams=8)
    service.rate, service.slowed = 0.7, 1.0
    service.run(1000)
    assert mean(service.run(600)) < 0.3
    service.slowed = 0.0
    service.run(1000)
    assert mean(service.run(300)) > 1


def test_probes_that_change_nothing_get_rare_for_new_sequences_too():
    service = Service()
    service.rate = 0.05
    service.run(300)
    first = service.sequences[0]
    usual = PaceSettings().probe_tokens
    assert service.pace.probe_tokens(first) > usual
    service.resize(0)
    service.resize(1)
    assert service.pace.probe_tokens(service.sequences[0]) > usual
    service.rate = 0.95
    service.run(200)
    assert service.pace.probe_tokens(service.sequences[0]) == usual


def test_probes_of_a_target_drafter_get_rare_since_all_sequences_wait_for_them():
    service = Service(streams=8, drafter="medusa")
    service.rate = 0.05
    service.run(600)
    alone = service.pace.probe_tokens(service.sequences[0]) // 8
    assert alone > PaceSettings().probe_tokens
    assert mean(service.run(600)) < 0.06
    service.rate = 0.95
    service.run(1000)
    assert mean(service.run(200)) > 1
    assert service.pace.probe_tokens(service.sequences[0]) == 8 * PaceSettings().probe_tokens


def test_pace_gives_up_few_slow_rounds_as_soon_as_many():
    """Sequences in plain decoding show nothing about rounds."""
    service = Service(streams=64)
    for sequence in service.sequences[8:]:
        sequence.max_depth = 0
    service.token, service.draft_step = 0.03e-3, 0.5e-3
    assert mean(service.run(200)[100:]) * 64 / 8 > 4
    service.waiting = 2.0
    assert mean(service.run(200)[100:]) * 64 / 8 < 1


def test_pace_soon_retries_drafting_that_noise_ended():
    """A first misjudgement does not last until the next trial of one who has long been plain."""
    drafted = []
    for seed in range(10):
        service = Service()
        service.drawn = random.Random(seed)
        service.rate = 0.6
        drafted += [depth > 0 for depth in service.run(150)]
    assert mean(drafted) > 0.7


@pytest.mark.slow
def test_pace_drafts_shallower_if_only_deep_rounds_are_slower_than_their_costs():
    service = Service(streams=8)
    service.rate, service.deep_waiting = 0.7, 2.0
    service.run(1500)
    depths = service.run(300)
    assert sum(1 <= depth <= 2 for depth in depths) > 200


@pytest.mark.parametrize(("streams", "rate", "draft_step"), [(1, 0.2, 15e-3), (8, 0.5, 40e-3)])
def test_pace_with_a_target_drafter_that_does_not_pay_loses_little_by_trying(streams, rate, draft_step):
    """All sequences of a step wait for a Draft that one of them tries."""
    service = Service(streams, drafter="eagle3")
    service.rate, service.draft_step = rate, draft_step
    service.run(300)
    seconds, tokens = service.seconds, service.tokens
    service.run(1500)
    plain_s = (service.tokens - tokens) / streams * service.plain_step
    assert plain_s / (service.seconds - seconds) > 0.96
