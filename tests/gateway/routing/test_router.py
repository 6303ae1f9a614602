"""Which drafter drafts, by what is known of each."""

from dataclasses import replace
from typing import cast

import pytest

from gateway.routing import router
from gateway.routing.router import CandidateDrafter, Router, TaskRule
from gateway.routing.tuning import TUNING
from outrider.drafters.registry import Place
from outrider.pace.controller import Pace
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING as PACE_TUNING
from outrider.telemetry.reasons import RouteReason
from tests.support.routes import CODE, PROSE, Machine, candidate

ENOUGH = 40  # guesses that make an acceptance known
THREE = [candidate("general"), candidate("code"), candidate("suffix", Place.GATEWAY)]


@pytest.fixture(autouse=True)
def decides_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "TUNING", replace(TUNING, decided_for_s=0.0))


def teach(routed: Router, kind: TaskRule, **rights: int) -> None:
    """Has the router observe ENOUGH first guesses of each drafter, of which ``rights`` were correct."""
    for name, right in rights.items():
        for guess in range(ENOUGH):
            routed.observe(kind, name, int(guess < right), 1)


def choice(routed: Router, kind: TaskRule, machine: Machine) -> tuple[str, str]:
    return routed.choice(kind, THREE, cast(Pace, machine))


def watched(routed: Router, kind: TaskRule, others: list[CandidateDrafter], share: float) -> list[str]:
    return [candidate.name for candidate in routed.watched(kind, others, PaceSettings(exploration=share))]


async def test_router_until_drafters_are_known_chooses_the_first() -> None:
    routed = Router(lambda info: True)
    assert choice(routed, CODE, Machine()) == ("general", RouteReason.FIRST)
    teach(routed, CODE, code=39)
    assert choice(routed, CODE, Machine()) == ("general", RouteReason.FIRST)
    teach(routed, CODE, general=20)
    assert choice(routed, CODE, Machine(is_known=False)) == ("general", RouteReason.FIRST)
    assert choice(routed, CODE, Machine()) == ("code", RouteReason.MEASURED)


async def test_router_chooses_the_best_drafter_of_each_task() -> None:
    routed, machine = Router(lambda info: True), Machine()
    teach(routed, CODE, general=20, code=36)
    teach(routed, PROSE, general=20, code=4)
    assert [choice(routed, kind, machine)[0] for kind in (CODE, PROSE)] == ["code", "general"]


async def test_router_chooses_a_cheaper_drafter_that_is_correct_less_often() -> None:
    routed = Router(lambda info: True)
    teach(routed, CODE, general=30, suffix=20)
    assert choice(routed, CODE, Machine())[0] == "general"
    assert choice(routed, CODE, Machine({"suffix": 1.5}))[0] == "suffix"


async def test_router_within_the_hysteresis_keeps_the_drafter() -> None:
    routed = Router(lambda info: True)
    teach(routed, CODE, general=30, code=31)
    assert choice(routed, CODE, Machine()) == ("general", RouteReason.MEASURED)


async def test_router_passes_over_a_draft_without_worker() -> None:
    lost = {"code"}
    routed, machine = Router(lambda info: info.name not in lost), Machine()
    teach(routed, CODE, general=20, code=36)
    assert choice(routed, CODE, machine)[0] == "general"
    lost.clear()
    assert choice(routed, CODE, machine)[0] == "code"
    lost.add("code")
    assert choice(routed, CODE, machine)[0] == "general"


async def test_router_under_a_new_rule_chooses_by_coupled_guesses() -> None:
    routed, machine = Router(lambda info: True), Machine()
    teach(routed, CODE, general=20, code=36)
    rejection = TaskRule("code", "rejection")
    assert choice(routed, rejection, machine)[0] == "code"
    teach(routed, rejection, general=36, code=20)
    assert choice(routed, rejection, machine)[0] == "general"


def test_watched_sequences_are_no_more_than_the_share_of_exploration() -> None:
    routed = Router(lambda info: True)
    teach(routed, CODE, code=20)
    explored = [watched(routed, CODE, THREE[1:], 0.1) for _ in range(1000)]
    assert all({*names} <= {"code", "suffix"} for names in explored)
    assert all("suffix" in names for names in explored)  # an index costs nothing
    costly = sum("code" in names for names in explored)
    assert 100 <= costly <= 100 + PACE_TUNING.most_credit


def test_watched_drafter_gets_no_other_sequence_at_once() -> None:
    routed = Router(lambda info: True)
    explored = [watched(routed, CODE, THREE[1:2], 0.1) for _ in range(10)]
    assert explored == [["code"], *[[]] * 7, ["code"], []]
    assert watched(routed, PROSE, THREE[1:2], 0.1) == ["code"]


def test_watched_drafters_are_the_unknown_first_and_then_each_in_turn() -> None:
    routed = Router(lambda info: True)
    others = [candidate("a"), candidate("b"), candidate("c")]
    teach(routed, CODE, a=20)
    assert watched(routed, CODE, others, 1.0) == ["b", "c"]
    teach(routed, CODE, b=20, c=20)
    explored = [watched(routed, CODE, others, 1.0) for _ in range(4)]
    assert explored == [["a"], ["b"], ["c"], ["a"]]
