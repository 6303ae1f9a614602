"""How far rounds fall short of what they were expected to be."""

import pytest

from outrider.pace.calibration import FADING, LARGEST, MEMORY, Calibration

LONG = int(10 * MEMORY)


def test_nothing_is_taken_to_overrun_before_it_was_seen():
    assert Calibration().of_rounds("model") == 1.0


def test_rounds_that_take_longer_than_expected_overrun():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 0.12, 0.1, 1)
    assert calibration.of_rounds("model") == pytest.approx(1.2, rel=1e-3)


def test_what_slows_plain_decoding_down_as_well_is_nothing_of_rounds():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 0.12, 0.1, 1)
        calibration.observe_plain(0.06, 0.05, 1)
    assert calibration.of_rounds("model") == pytest.approx(1.0, rel=1e-3)


def test_rounds_with_fewer_tokens_than_expected_overrun():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_tokens("model", 2.0, 2.5, 1)
    assert calibration.of_rounds("model") == pytest.approx(1.25, rel=1e-3)


def test_many_sequences_that_tell_of_one_round_count_as_one():
    alone, many = Calibration(), Calibration()
    alone.observe_round("model", 0.15, 0.1, 1)
    for _ in range(64):
        many.observe_round("model", 0.15, 0.1, 64)
    assert many.of_rounds("model") == pytest.approx(alone.of_rounds("model"), rel=0.01)


def test_one_round_that_took_for_ever_changes_little():
    calibration = Calibration()
    calibration.observe_round("model", 100.0, 0.1, 1)
    assert calibration.of_rounds("model") == pytest.approx(1.0 + (LARGEST - 1.0) / MEMORY)


def test_what_is_not_seen_any_more_is_taken_to_be_like_the_other_kind():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("model", 0.13, 0.1, 1)
        calibration.observe_plain(0.11, 0.1, 1)
        calibration.observe_tokens("model", 2.0, 3.0, 1)
    for _ in range(int(10 * FADING)):
        calibration.stepped(())
    assert calibration.of_rounds("model") == pytest.approx(1.0, abs=1e-3)


def test_each_drafter_has_rounds_of_its_own():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("slow", 0.15, 0.1, 1)
        calibration.observe_round("fast", 0.1, 0.1, 1)
    assert calibration.of_rounds("slow") == pytest.approx(1.5, rel=1e-3)
    assert calibration.of_rounds("fast") == pytest.approx(1.0, rel=1e-3)


def test_a_drafter_that_no_longer_drafts_is_taken_to_be_like_the_one_that_does():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("slow", 0.15, 0.1, 1)
        calibration.observe_round("fast", 0.11, 0.1, 1)
        calibration.observe_tokens("slow", 2.0, 2.5, 1)
    for _ in range(int(10 * FADING)):
        calibration.stepped({"fast"})
    assert calibration.of_rounds("slow") == pytest.approx(calibration.of_rounds("fast"), rel=1e-2)


def test_a_drafter_that_is_new_is_taken_to_be_like_the_others():
    calibration = Calibration()
    for _ in range(LONG):
        calibration.observe_round("old", 0.12, 0.1, 1)
    assert calibration.of_rounds("new") == pytest.approx(1.2, rel=1e-3)
