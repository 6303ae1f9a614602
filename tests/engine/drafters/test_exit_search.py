"""The search for the part of a target that drafts best."""

import pytest

from outrider.engine.drafters.exit_search import POSITIONS, ExitSearch, candidates, promised
from outrider.engine.drafters.trial import TrialResult

EARLY, LATE = (0,), (0, 1, 2)


def test_candidates_are_parts_with_something_left_out() -> None:
    for count in range(2, 81):
        parts = candidates(count)
        assert parts == [*dict.fromkeys(parts)]
        assert all(0 < len(part) < count and [*part] == sorted({*part}) for part in parts)
    assert candidates(1) == []
    found = candidates(32)
    assert (0, 1, 2, 3) in found
    assert all((0 in part) for part in found)
    assert sum(31 in part for part in found) == 2  # the last one stays where inner ones are left out


def test_promise_of_a_part_grows_with_acceptance_and_falls_with_cost() -> None:
    assert promised(0.8, 0.1) > promised(0.7, 0.1) > promised(0.7, 0.2)
    assert promised(0.0, 0.5) == pytest.approx(1 / 1.5)
    assert promised(1.0, 0.0) == pytest.approx(17)


def judge(right: dict[tuple[int, ...], float], search: ExitSearch) -> None:
    while not search.is_over:
        layers = search.next
        search.observe(layers, TrialResult(round(16 * right[layers]), 16))


def test_best_is_what_promises_most_whatever_it_costs() -> None:
    search = ExitSearch({EARLY: 0.25, LATE: 0.75})
    judge({EARLY: 0.5, LATE: 0.75}, search)
    assert search.best == EARLY
    search = ExitSearch({EARLY: 0.25, LATE: 0.30})
    judge({EARLY: 0.5, LATE: 0.75}, search)
    assert search.best == LATE


def test_best_part_is_none_if_no_part_would_pay() -> None:
    search = ExitSearch({EARLY: 0.25, LATE: 0.75})
    judge({EARLY: 0.125, LATE: 0.5}, search)
    assert search.best is None
    assert str(search).startswith("the first 1 layers: 0.12 correct, 0.90 times plain decoding")


def test_each_candidate_is_judged_as_often() -> None:
    search = ExitSearch(dict.fromkeys(candidates(32), 0.5))
    trials = 0
    while not search.is_over:
        search.observe(search.next, TrialResult(8, 16))
        trials += 1
    assert trials == len(candidates(32)) * POSITIONS / 16
