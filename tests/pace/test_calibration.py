"""How far rounds fall short of what they were expected to be."""

import pytest

from outrider.pace.calibration import Calibration
from outrider.pace.tuning import TUNING

LONG = int(10 * TUNING.calibration_memory)


def overrun(calibration, drafter, depth=4):
    return calibration.factors(drafter)[depth - 1]


def test_calibration_before_any_observation_is_1():
    assert set(Calibration().factors("model")) == {1.0}


def test_rounds_that_take_longer_than_expected_overrun():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 4, 0.12, 0.1, 1)
    assert overrun(calibration, "model") == pytest.approx(1.2, rel=1e-3)


def test_calibration_ignores_what_slows_both_kinds_down():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 4, 0.12, 0.1, 1)
        calibration.observe_plain(0.06, 0.05, 1)
    assert overrun(calibration, "model") == pytest.approx(1.0, rel=1e-3)


def test_rounds_with_fewer_tokens_than_expected_overrun():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_tokens("model", 2.0, 2.5, 1)
    assert overrun(calibration, "model") == pytest.approx(1.25, rel=1e-3)


def test_calibration_counts_a_round_once_however_many_sequences_report_it():
    alone, many = Calibration(), Calibration()
    alone.observe_round("model", 4, 0.15, 0.1, 1)
    for _ in range(64):
        many.observe_round("model", 4, 0.15, 0.1, 64)
    assert overrun(many, "model") == pytest.approx(overrun(alone, "model"), rel=0.01)


def test_calibration_believes_a_trial_soon():
    calibration = Calibration()
    for _ in range(10 * 8):
        calibration.observe_plain(0.05, 0.1, 8, is_trial=True)
        calibration.observe_step({"model"})
    assert overrun(calibration, "model") > 1.8


def test_calibration_changes_little_after_an_outlier():
    calibration = Calibration()
    calibration.observe_round("model", 4, 100.0, 0.1, 1)
    more = TUNING.calibration_limit - 1.0
    assert overrun(calibration, "model") == pytest.approx(
        (1.0 + more / TUNING.calibration_memory) * (1.0 + more / TUNING.calibration_depth_memory)
    )


def test_calibration_changes_little_after_a_time_of_0():
    """Steps of a worker without timings seem to take no time."""
    calibration = Calibration()
    calibration.observe_round("model", 4, 0.0, 0.1, 1)
    calibration.observe_plain(0.0, 0.1, 1)
    assert 0.9 < overrun(calibration, "model") < 1.1


def test_calibration_of_rounds_not_seen_fades_to_plain_decoding():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 4, 0.13, 0.1, 1)
        calibration.observe_plain(0.11, 0.1, 1)
        calibration.observe_tokens("model", 2.0, 3.0, 1)
    for _ in range(int(10 * TUNING.calibration_fading)):
        calibration.observe_step(())
    assert overrun(calibration, "model") == pytest.approx(1.0, abs=1e-3)


def test_calibration_of_rounds_given_up_soon_again_and_again_fades_more_slowly():
    def after_a_pause(vain_trials: int) -> float:
        calibration = Calibration()
        for _ in range(vain_trials):
            for _ in range(LONG):
                calibration.observe_round("model", 4, 0.15, 0.1, 1)
            calibration.observe_step({"model"})
            calibration.observe_step(())
        for _ in range(int(TUNING.calibration_fading)):
            calibration.observe_step(())
        return overrun(calibration, "model")

    assert 1.0 < after_a_pause(1) < after_a_pause(2) < after_a_pause(3) < 1.5


def test_rounds_and_single_tokens_instead_of_them_count_by_the_time_that_they_take():
    """A late Draft leaves a short time with one token. Here every second Draft is late."""
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 4, 0.18, 0.1, 1)
        calibration.observe_tokens("model", 3.0, 3.0, 1)
        calibration.observe_round("model", 4, 0.06, 0.1, 1)
        calibration.observe_tokens("model", 1.0, 3.0, 1)
    assert overrun(calibration, "model") == pytest.approx((0.24 / 4.0) / (0.1 / 3.0), rel=0.05)


def test_plain_decoding_beside_rounds_has_a_factor_of_its_own():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_plain(0.05, 0.05, 1)
        calibration.observe_plain_beside_rounds(0.08, 0.05, 1)
    assert calibration.plain_factor == pytest.approx(1.6, rel=1e-3)
    for _ in range(int(10 * TUNING.calibration_fading)):
        calibration.observe_step(())
    assert calibration.plain_factor == pytest.approx(1.0, abs=1e-3)


def test_calibration_of_a_drafter_ignores_rounds_of_others():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("slow", 4, 0.15, 0.1, 1)
        calibration.observe_round("fast", 4, 0.1, 0.1, 1)
    assert overrun(calibration, "slow") == pytest.approx(1.5, rel=1e-3)
    assert overrun(calibration, "fast") == pytest.approx(1.0, rel=1e-3)


def test_calibration_of_an_idle_drafter_fades_to_the_active_one():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("slow", 4, 0.15, 0.1, 1)
        calibration.observe_round("fast", 4, 0.11, 0.1, 1)
        calibration.observe_tokens("slow", 2.0, 2.5, 1)
    for _ in range(int(10 * TUNING.calibration_fading)):
        calibration.observe_step({"fast"})
    assert overrun(calibration, "slow") == pytest.approx(overrun(calibration, "fast"), rel=1e-2)


def test_calibration_of_a_new_drafter_equals_that_of_others():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("old", 4, 0.12, 0.1, 1)
    assert overrun(calibration, "new") == pytest.approx(1.2, rel=1e-3)


def test_calibration_learns_an_overrun_by_a_large_factor():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 4, 0.8, 0.1, 1)
    assert overrun(calibration, "model") == pytest.approx(8.0, rel=1e-2)


def test_deep_rounds_may_overrun_by_more_than_shallow_ones():
    calibration = Calibration()
    for _ in range(10 * LONG):
        calibration.observe_round("model", 2, 0.11, 0.1, 1)
        calibration.observe_round("model", 8, 0.2, 0.1, 1)
    assert (
        overrun(calibration, "model", 1) == overrun(calibration, "model", 2) == pytest.approx(1.1, rel=0.02)
    )
    assert (
        overrun(calibration, "model", 5) == overrun(calibration, "model", 8) == pytest.approx(2.0, rel=0.02)
    )


def test_calibration_at_one_depth_mostly_holds_for_others():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 8, 0.2, 0.1, 1)
    assert 1.6 < overrun(calibration, "model", 2) < overrun(calibration, "model", 8)


def test_calibration_of_single_depths_is_forgotten():
    calibration = Calibration()
    for _ in range(10 * LONG):
        calibration.observe_round("model", 2, 0.1, 0.1, 1)
        calibration.observe_round("model", 8, 0.2, 0.1, 1)
    for _ in range(int(10 * TUNING.calibration_fading)):
        calibration.observe_step({"model"})
    assert overrun(calibration, "model", 8) == pytest.approx(overrun(calibration, "model", 2), rel=1e-3)
