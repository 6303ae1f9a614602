"""Names of the drafters of a deployment."""

from dataclasses import replace

import pytest

from gateway.roster import Roster
from gateway.settings import GatewaySettings
from outrider.drafters import registry
from outrider.drafters.registry import DrafterInfo, Place
from outrider.engine.settings import EngineSettings

OWN = DrafterInfo("own", "a row of a user's", Place.DRAFT_WORKER, "own:Own", steps_per_draft=3.0)


def test_roster_names_drafts_by_their_own_and_others_by_their_row() -> None:
    there = {row.name: row.place for row in Roster({"small": "model", "code": "parallel"}, ["eagle3"])}
    assert there == {
        "small": Place.DRAFT_WORKER,
        "code": Place.DRAFT_WORKER,
        "small+suffix": Place.DRAFT_WORKER,
        "code+suffix": Place.DRAFT_WORKER,
        "ngram": Place.GATEWAY,
        "suffix": Place.GATEWAY,
        "eagle3": Place.TARGET_WORKER,
        "eagle3+suffix": Place.TARGET_WORKER,
        "eagle3+suffix+ngram": Place.TARGET_WORKER,
    }


def test_roster_draft_has_the_costs_of_its_row() -> None:
    roster = Roster({"small": "model", "code": "parallel"})
    assert [roster.find(name).is_parallel for name in ("small", "code", "code+suffix")] == [False, True, True]
    assert roster.find("code+suffix").mixes == ("code", "suffix")


@pytest.mark.parametrize("name", ["model", "parallel", "parallel+suffix", "tea leaves"])
def test_roster_name_of_a_row_finds_no_draft(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no drafter '{name.replace('+', '.')}'; there are: small, ngram"):
        Roster({"small": "model"}).find(name)


@pytest.mark.parametrize("name", ["medusa", "medusa+suffix"])
def test_roster_head_of_another_target_is_not_found(name: str) -> None:
    named = name.replace("+", ".")
    with pytest.raises(ValueError, match=rf"'{named}' would run in the target's process, .* 'eagle3'; "):
        Roster({}, ["eagle3"]).find(name)


def test_roster_finds_a_draft_under_the_facts_of_a_users_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    settings = GatewaySettings(model="m", tokenizer="t", drafts={"mine": f"{__name__}:OWN"})
    assert settings.roster.find("mine") == replace(OWN, name="mine")


@pytest.mark.parametrize("setting", ["ngram", "model+suffix", "tea", "no.module:ROW", f"{__name__}:replace"])
def test_worker_drafter_of_no_draft_worker_is_refused_with_field_and_value(setting: str) -> None:
    with pytest.raises(ValueError) as refused:
        EngineSettings(model="m", worker_drafter=setting)
    assert "worker_drafter" in str(refused.value)
    assert setting in str(refused.value)
