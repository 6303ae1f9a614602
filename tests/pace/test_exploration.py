"""What is tried only to learn from it, and how often."""

from itertools import pairwise

from outrider.drafters.registry import drafter
from outrider.pace.exploration import NEVER, Probes, Trials, Turns, Watches, watch_tokens
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING

SETTINGS = PaceSettings()
OFF = PaceSettings(explores=False)


def trial_steps(trials: Trials, settings: PaceSettings, steps: int) -> list[int]:
    """Numbers of the steps, all with Drafts, after which a trial begins."""
    started = []
    for step in range(steps):
        trials.observe_step(is_drafting=True)
        if trials.begin(settings, 1):
            started.append(step)
    return started


def test_trials_begin_early_then_get_rarer_up_to_the_setting():
    started = trial_steps(Trials(), SETTINGS, 1600)
    assert [started[0], *(after - before for before, after in pairwise(started))] == [
        *(TUNING.first_trial, 4 * TUNING.first_trial, 16 * TUNING.first_trial),
        *[SETTINGS.trial_steps] * 2,
    ]


def test_trials_after_the_load_has_doubled_begin_soon():
    trials = Trials()
    trial_steps(trials, SETTINGS, 600)
    trials.observe_load(2)
    assert trial_steps(trials, SETTINGS, SETTINGS.trial_steps)[0] <= TUNING.first_trial


def test_trials_of_plain_decoding_that_are_rare_have_more_tokens():
    trials = Trials()
    tokens = []
    for _ in range(1000):
        trials.observe_step(is_drafting=True)
        tokens.append(trials.begin(SETTINGS, 1))
    assert (tokens[TUNING.first_trial], tokens[-1] or max(tokens[-SETTINGS.trial_steps :])) == (
        1,
        SETTINGS.trial_steps // TUNING.trial_steps_per_token,
    )


def test_turns_of_a_trial_are_rounds_for_a_plain_sequence_and_tokens_for_one_in_rounds():
    plain, in_rounds = Turns(), Turns()
    plain.try_kind(is_drafting=False, plain_tokens=2)
    in_rounds.try_kind(is_drafting=True, plain_tokens=2)
    assert (plain.left, in_rounds.left) == (TUNING.trial_rounds, 2)


def test_probes_that_change_nothing_get_rarer_until_one_succeeds():
    probes, model = Probes(), drafter("model")
    waits = []
    for _ in range(4):
        waits.append(probes.interval(SETTINGS, model, 1))
        probes.observe(succeeded=False)
    assert waits == [16, 32, 64, 16 << TUNING.probe_doublings]
    probes.observe(succeeded=True)
    assert probes.interval(SETTINGS, model, 1) == 16


def test_probes_of_a_target_drafter_are_made_by_one_sequence_at_a_time():
    assert Probes().interval(SETTINGS, drafter("medusa"), 8) == 8 * 16
    assert Probes().interval(SETTINGS, drafter("model"), 8) == 16


def test_watches_end_with_the_credit_and_go_on_with_its_share():
    watches = Watches()
    known = {"other": True}
    started = [bool(watches.begin(SETTINGS, "code", known)) for _ in range(200)]
    assert all(started[: int(TUNING.most_credit)])
    assert sum(started[100:]) == 100 * SETTINGS.exploration


def test_watches_of_an_unknown_drafter_leave_a_gap():
    watches = Watches()
    started = [
        watches.begin(SETTINGS, "code", {"known": True, "new": False}) for _ in range(TUNING.watch_again + 1)
    ]
    assert started == [["new"], *[[]] * (TUNING.watch_again - 1), ["new"]]


def test_watch_tokens_are_fewer_until_the_drafter_is_known():
    assert (watch_tokens(SETTINGS, True), watch_tokens(SETTINGS, False)) == (16, 4)


def test_exploration_that_is_turned_off_tries_nothing():
    assert trial_steps(Trials(), OFF, 1000) == []
    assert Probes().interval(OFF, drafter("model"), 1) == NEVER
    assert Watches().begin(OFF, "code", {"other": False}) == []
