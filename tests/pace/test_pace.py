"""Depths that the pace decides in a simulated service."""

import random
from itertools import pairwise

import pytest

from outrider.pace.costs import RoundTimes
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING
from tests.support.paced_service import Service, mean

INDEPENDENT = ExpertsRead.independent(8 / 128)


def test_pace_after_one_bad_round_goes_on_drafting():
    service = Service()
    service.rate = 0.0
    service.run(1)
    service.rate = 0.8
    assert min(service.run(10)) > 0


def test_pace_gives_up_bad_drafts():
    service = Service()
    service.rate = 0.05
    service.run(100)
    assert mean(service.run(300)) < 0.1


def test_pace_drafts_deep_and_stays_on_if_drafts_are_good():
    service = Service()
    service.rate = 0.95
    service.run(100)
    assert mean(service.run(300)) > 5


@pytest.mark.parametrize(("drafter", "pays"), [("model", False), ("parallel", True)])
def test_pace_uses_a_slow_draft_only_if_it_drafts_in_one_pass(drafter, pays):
    """A pass takes two thirds of the target's step, as that of a 1B draft on an L4 with a 70B target."""
    service = Service(drafter=drafter)
    service.draft_step = 10e-3
    service.run(200)
    assert (mean(service.run(300)) > 4) is pays


def test_pace_that_ended_drafts_ignores_the_times_of_rounds_under_way():
    """They were expected under an earlier decision."""
    service = Service(streams=8)
    service.rate = 0.02
    service.run(200)
    calibration = service.pace._costs._calibration
    before = calibration.factors("model")
    for sequence in service.sequences:
        assert sequence.depth == 0
        assert not sequence.is_trying
        sequence.follows_round = True
        service.pace.observe_round(sequence, 0, 1, RoundTimes(8, 0.05, 1e-3, 15e-3))
    assert calibration.factors("model") == pytest.approx(before)


def test_pace_ignores_the_time_of_a_first_round_after_plain_decoding():
    """The draft first reads the text that was decoded without it."""
    service = Service()
    service.run(100)
    (sequence,), calibration = service.sequences, service.pace._costs._calibration
    sequence.turns.try_kind(is_drafting=True, plain_tokens=1)
    service.pace.observe_plain(sequence, service.plain_step)
    before = calibration.factors("model")
    slow = RoundTimes(sequence.depth, 0.05, 1e-3, 15e-3)
    service.pace.observe_round(sequence, 0, 1, slow)
    assert calibration.factors("model") == pytest.approx(before)
    service.pace.observe_round(sequence, 0, 1, slow)
    assert calibration.factors("model") != pytest.approx(before)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_pace_under_load_ends_drafts_and_begins_them_again_after_it(noise):
    service = Service()
    service.noise, service.rate = noise, 0.7
    service.run(200)
    assert mean(service.run(50)) > 1
    for streams in (2, 4, 8, 16, 32, 64, 128, 256):
        service.resize(streams)
        service.run(20)
    assert mean(service.run(50)) < 0.3
    service.resize(1)
    assert mean(service.run(40)[-20:]) > 1


def test_pace_of_a_new_crowd_is_decided_anew():
    """Costs of an earlier crowd decide, before any of the new sequences has reported a step."""
    service = Service(streams=256)
    service.rate = 0.6
    service.run(200)
    service.resize(1)
    service.run(200)
    assert service.sequences[0].depth > 1
    service.resize(256)
    assert mean([sequence.depth for sequence in service.sequences]) < 0.3


def depths_by_streams(experts: ExpertsRead) -> list[float]:
    """Mean depths for 1, 4 and 64 streams, if reading all experts takes eight times all else."""
    service = Service()
    service.experts, service.reading, service.rate, service.token = experts, 120e-3, 0.6, 0.1e-3
    service.run(100)
    found = []
    for streams in (1, 4, 64):
        service.resize(streams)
        service.run(40)
        found.append(mean(service.run(40)))
    return found


def test_pace_of_a_mixture_drafts_once_many_streams_read_all_experts_anyway():
    """A token chooses 8 of 128. With a dense model it is the other way round."""
    *few, many = depths_by_streams(INDEPENDENT)
    assert max(few) < 0.3
    assert many > 2
    *few, many = depths_by_streams(NO_EXPERTS)
    assert min(few) > 1.5
    assert many < 0.3


def test_pace_of_a_mixture_drafts_for_one_stream_if_neighbouring_tokens_choose_alike():
    """It is told nothing of that but the experts that steps have counted."""
    alike = ExpertsRead(of_sequence=0.6 * INDEPENDENT.of_token, of_token=0.4 * INDEPENDENT.of_token)
    assert depths_by_streams(alike)[0] > 1


@pytest.mark.parametrize(("further", "pays"), [(0, False), (3, True)])
def test_pace_counts_the_tokens_that_an_index_adds_to_drafts(further, pays):
    """Under a load at which the drafter's own guesses do not pay."""
    service = Service(drafter="eagle3")
    service.rate, service.further = 0.6, further
    service.run(200)
    service.resize(32)
    service.run(50)
    assert (mean(service.run(100)) > 0.5) is pays


def test_pace_adds_nodes_for_one_stream_and_for_no_stream_of_a_full_batch():
    service = Service()
    service.run(200)
    alone = service.sequences[0].decision.least_survival
    service.resize(64)
    service.run(20)
    crowd = [sequence.decision.least_survival for sequence in service.sequences]
    assert 0.0 < alone < 0.1  # tokens cost nothing until there are 32
    assert min(crowd) > 0.5


@pytest.mark.parametrize("draft_step", [2.5e-3, 8e-3])
def test_patience_in_plain_decoding_covers_a_guess(draft_step):
    service = Service()
    service.rate, service.draft_step = 0.0, draft_step
    service.run(400)
    (sequence,) = service.sequences
    assert (sequence.depth, sequence.decision.decided_by) == (0, "measured")
    assert sequence.decision.patience_s > 1e-3 + 2 * TUNING.probe_depth * draft_step


def test_pace_under_noise_does_not_flap():
    service = Service(streams=8)
    service.noise, service.rate = 0.2, 0.7
    service.run(200)
    depths = service.run(400)
    switched = sum((before > 0) != (after > 0) for before, after in pairwise(depths))
    trials = 1 + 400 // PaceSettings().trial_steps
    assert switched <= 2 * trials  # there and back


def test_pace_until_costs_are_known_keeps_drafts_correct_less_than_half_the_time():
    first = []
    for seed in range(10):
        service = Service()
        service.drawn = random.Random(seed)
        service.rate, service.draft_step = 0.45, 0.2e-3
        first += service.run(100)[20:]
    assert mean(depth > 0 for depth in first) > 0.9


def test_depth_keeps_the_caps_of_request_and_settings():
    service = Service(streams=2, settings=PaceSettings(max_depth=5))
    service.rate = 0.99
    service.sequences[0].max_depth = 2
    service.run(300)
    assert [service.pace.depth(sequence) for sequence in service.sequences] == [2, 5]


def test_thresholds_decide_if_the_policy_asks_for_them():
    service = Service(streams=32, settings=PaceSettings(policy="thresholds"))
    service.rate = 0.95
    assert set(service.run(100)[-50:]) == {2}
    service.pace.use(PaceSettings(policy="thresholds", half_depth_from=64))
    service.run(2)
    assert set(service.run(10)) == {4}
    service.pace.use(PaceSettings(policy="thresholds", off_from=32))
    service.run(2)
    assert set(service.run(10)) == {0}


def test_depth_is_larger_if_draft_ahead_hides_drafting():
    """A draft that does not pay otherwise pays if most of its time is hidden."""
    service = Service()
    service.rate, service.draft_step = 0.7, 12e-3
    service.run(300)
    assert mean(service.run(300)) < 0.3
    ahead = Service()
    ahead.rate, ahead.draft_step, ahead.foreseen = 0.7, 12e-3, 0.9
    ahead.run(300)
    assert mean(ahead.run(1000)) > 0.7


@pytest.mark.parametrize(("rank", "has_alternatives"), [(1, True), (4, False)])
def test_alternatives_are_sent_once_second_guesses_are_known_to_be_correct(rank, has_alternatives):
    """A draft worker and heads both make alternatives; heads continue theirs, so they send more."""
    alternatives = {}
    for drafter in ("model", "eagle3"):
        service = Service(drafter=drafter)
        service.rate = 0.6
        service.run(60)
        assert service.sequences[0].decision.alternatives == 0
        for _ in range(20):
            service.sequences[0].acceptance.task.observe_rank(rank)
        service.run(60)
        alternatives[drafter] = service.sequences[0].decision.alternatives
    assert (alternatives["model"] > 0) is has_alternatives
    assert (alternatives["eagle3"] > alternatives["model"]) is has_alternatives


def test_patience_is_no_longer_than_a_draft_is_worth():
    service = Service()
    service.rate = 0.9
    service.run(200)
    (sequence,) = service.sequences
    usual = 1e-3 + (sequence.depth + 0.5) * service.draft_step
    assert usual < sequence.decision.patience_s < 10 * 15e-3


def test_pace_of_many_sequences_asks_none_of_them_between_two_decisions(monkeypatch):
    """Every sequence asks for a refresh at every token, so asking each of them would take their square."""
    service = Service(streams=64)
    service.run(50)
    service.pace.refresh()
    asked = []
    monkeypatch.setattr(PacedSequence, "cap", lambda sequence, settings: asked.append(sequence) or 8)
    for sequence in service.sequences:
        service.pace.refresh()
        service.pace.observe_plain(sequence, service.plain_step)
    assert asked == []
