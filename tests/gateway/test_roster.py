"""Names of the drafters of a deployment."""

import pytest

from gateway.roster import Roster
from outrider.drafters.registry import Place


def test_roster_names_drafts_by_their_own_and_others_by_their_row() -> None:
    there = {row.name: row.place for row in Roster({"small": "model", "code": "parallel"}, "eagle3")}
    assert there == {
        "small": Place.DRAFT_WORKER,
        "code": Place.DRAFT_WORKER,
        "small+suffix": Place.DRAFT_WORKER,
        "code+suffix": Place.DRAFT_WORKER,
        "ngram": Place.GATEWAY,
        "suffix": Place.GATEWAY,
        "eagle3": Place.TARGET_WORKER,
    }


def test_roster_draft_has_the_costs_of_its_row() -> None:
    roster = Roster({"small": "model", "code": "parallel"}, None)
    assert [roster.find(name).is_parallel for name in ("small", "code", "code+suffix")] == [False, True, True]
    assert roster.find("code+suffix").mixes == ("code", "suffix")


@pytest.mark.parametrize("name", ["model", "parallel", "parallel+suffix", "tea leaves"])
def test_roster_name_of_a_row_finds_no_draft(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no drafter '{name.replace('+', '.')}'; there are: small, ngram"):
        Roster({"small": "model"}, None).find(name)


def test_roster_head_of_another_target_is_not_found() -> None:
    with pytest.raises(ValueError, match=r"'medusa' would stand beside the target, and there is 'eagle3'; "):
        Roster({}, "eagle3").find("medusa")
