"""Roll-out of a new draft: it is judged first, then drafts more sequences while it is worth more."""

from dataclasses import replace
from typing import cast

import pytest

from gateway.routing import router
from gateway.routing.rollout import Rollout
from gateway.routing.router import CandidateDrafter, Router, TaskRule
from gateway.routing.tuning import TUNING
from outrider.pace.controller import Pace
from tests.support.routes import CODE, PROSE, Machine, candidate

MARGIN = 0.03
BETTER, WORSE = (1.05, 1.0), (0.95, 1.0)  # tokens per second of the new draft and of the old


def at(step: int) -> Rollout:
    """One that has come so far."""
    rollout = Rollout()
    for _ in range(step):
        rollout.seen += rollout.needed
        rollout.compare(*BETTER, MARGIN)
    assert rollout.share == TUNING.shares[step]
    return rollout


def test_rollout_before_enough_judged_guesses_has_no_share() -> None:
    rollout = Rollout()
    rollout.seen += TUNING.drafts - 1
    rollout.compare(*BETTER, MARGIN)
    assert not any(rollout.admits() for _ in range(100))
    rollout.seen += 1
    rollout.compare(*BETTER, MARGIN)
    assert rollout.share == TUNING.shares[1] > 0.0


@pytest.mark.parametrize("step", range(len(TUNING.shares) - 1))
def test_rollout_share_grows_after_enough_drafts_at_the_share_before(step: int) -> None:
    rollout = at(step)
    for _ in range(TUNING.drafts - 1):
        rollout.seen += 1
        rollout.compare(*BETTER, MARGIN)
    assert rollout.share == TUNING.shares[step]
    rollout.seen += 1
    rollout.compare(*BETTER, MARGIN)
    assert rollout.share == TUNING.shares[step + 1]


@pytest.mark.parametrize("step", range(1, len(TUNING.shares)))
def test_rollout_admits_its_share_evenly(step: int) -> None:
    rollout = at(step)
    every = round(1 / TUNING.shares[step])
    assert [rollout.admits() for _ in range(5 * every)] == ([False] * (every - 1) + [True]) * 5


@pytest.mark.parametrize("step", range(len(TUNING.shares)))
def test_rollout_of_equal_worth_keeps_its_share(step: int) -> None:
    rollout = at(step)
    rollout.seen += 10 * TUNING.drafts
    for rates in ((1.01, 1.0), (1.0, 1.01), (1.2, 0.0), (0.0, 1.2)):  # 0: that is not known
        rollout.compare(*rates, MARGIN)
    assert rollout.share == TUNING.shares[step]


@pytest.mark.parametrize("step", range(1, len(TUNING.shares)))
def test_rollout_of_less_worth_goes_back_at_once_and_needs_twice_as_many_drafts(step: int) -> None:
    rollout = at(step)
    rollout.compare(*WORSE, MARGIN)
    assert (rollout.share, rollout.changes[0.0], rollout.needed) == (0.0, 1, 2 * TUNING.drafts)
    rollout.seen += 2 * TUNING.drafts - 1
    rollout.compare(*BETTER, MARGIN)
    assert rollout.share == 0.0
    rollout.seen += 1
    rollout.compare(*BETTER, MARGIN)
    assert rollout.share == TUNING.shares[1]


def test_rollout_after_many_returns_can_still_grow() -> None:
    rollout = Rollout()
    for _ in range(20):
        rollout.seen += rollout.needed
        rollout.compare(*BETTER, MARGIN)
        rollout.go_back()
    assert rollout.needed == TUNING.drafts << TUNING.doublings
    assert rollout.changes == {TUNING.shares[1]: 20, 0.0: 20}


OLD, NEW = candidate("old"), candidate("new")
NEW = CandidateDrafter(NEW.drafter, NEW.paced, is_new=True)


@pytest.fixture(autouse=True)
def decides_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "TUNING", replace(TUNING, decided_for_s=0.0))


def rolling_out(lost: frozenset[str] | set[str] = frozenset()) -> Router:
    routed = Router(lambda info: info.name not in lost)
    routed.roll_out(["new"])
    return routed


def teach(routed: Router, kind: TaskRule, drafts: int = TUNING.drafts, **correct: bool) -> None:
    """Teaches the router that many first guesses of each drafter, all correct or all wrong."""
    for name, is_right in correct.items():
        for _ in range(drafts):
            routed.observe(kind, name, int(is_right), 1)


def admitted(routed: Router, kind: TaskRule, machine: Machine, sequences: int = 8) -> int:
    """Number of beginning sequences that the new draft drafts."""
    of = [routed.admitted(kind, [OLD, NEW], cast(Pace, machine)) for _ in range(sequences)]
    assert all(candidate is NEW for candidate in of if candidate is not None)
    return sum(candidate is not None for candidate in of)


async def test_rollout_of_a_better_draft_grows_step_by_step() -> None:
    routed, machine, given = rolling_out(), Machine(), []
    teach(routed, CODE, old=False)
    for _ in TUNING.shares:
        given.append(admitted(routed, CODE, machine))
        teach(routed, CODE, new=True)
    assert given == [0, 1, 2, 4, 8]
    assert routed.keeps(CODE, NEW, [OLD, NEW], cast(Pace, machine))


async def test_rollout_of_a_worse_draft_admits_nothing() -> None:
    routed, machine = rolling_out(), Machine()
    teach(routed, CODE, old=True)
    for _ in range(20):
        teach(routed, CODE, new=False)
        assert admitted(routed, CODE, machine) == 0


async def test_rollout_of_a_slower_draft_admits_nothing() -> None:
    routed, machine = rolling_out(), Machine({"new": 0.8})
    teach(routed, CODE, old=True)
    teach(routed, CODE, 10 * TUNING.drafts, new=True)
    assert admitted(routed, CODE, machine) == 0


async def test_rollout_of_each_task_is_separate() -> None:
    routed, machine = rolling_out(), Machine()
    for kind, is_better in ((CODE, True), (PROSE, False)):
        teach(routed, kind, old=not is_better)
        teach(routed, kind, new=is_better)
    assert (admitted(routed, CODE, machine), admitted(routed, PROSE, machine)) == (1, 0)
    assert {(kind, name, rollout.share) for kind, name, rollout in routed.rollouts} == {
        (CODE, "new", TUNING.shares[1]),
        (PROSE, "new", 0.0),
    }


async def test_rollout_goes_back_within_a_sequence_if_the_text_changes() -> None:
    routed, machine = rolling_out(), Machine()
    teach(routed, CODE, old=True, drafts=4 * TUNING.drafts)
    machine.worth["old"] = 0.5
    teach(routed, CODE, new=True)
    assert admitted(routed, CODE, machine) == 1
    teach(routed, CODE, new=False, drafts=4 * TUNING.drafts)
    assert routed.keeps(CODE, NEW, [OLD, NEW], cast(Pace, machine))  # it is worth as much still
    machine.worth["old"] = 1.0
    assert not routed.keeps(CODE, NEW, [OLD, NEW], cast(Pace, machine))
    assert admitted(routed, CODE, machine) == 0


async def test_rollout_without_a_worker_goes_back_and_begins_anew() -> None:
    lost = set[str]()
    routed, machine = rolling_out(lost), Machine()
    teach(routed, CODE, old=False)
    teach(routed, CODE, new=True)
    assert admitted(routed, CODE, machine) == 1
    lost.add("new")
    assert admitted(routed, CODE, machine) == 0
    lost.clear()
    teach(routed, CODE, new=True)
    assert admitted(routed, CODE, machine) == 0  # it has to show twice as much
    teach(routed, CODE, new=True)
    assert admitted(routed, CODE, machine) == 1


async def test_rollout_of_a_draft_that_left_is_forgotten() -> None:
    routed, machine = rolling_out(), Machine()
    teach(routed, CODE, old=False)
    teach(routed, CODE, new=True)
    assert admitted(routed, CODE, machine) == 1
    routed.roll_out(["new", "another"])  # deployed again: what has been earned stays
    assert routed.share(CODE, "new") == TUNING.shares[1]
    routed.roll_out([])
    assert admitted(routed, CODE, machine) == 0
    assert not routed.keeps(CODE, NEW, [OLD, NEW], cast(Pace, machine))
    routed.roll_out(["new"])
    assert routed.share(CODE, "new") == 0.0
