"""Where the ranks of a target go: refused at start, by name, where there is no room."""

from typing import Any

import pytest
import ray

from cluster.arguments import read_settings
from cluster.settings import Settings
from cluster.start import check_placement, rank_resources


def settings(**fields: Any) -> Settings:
    return read_settings({"target": {"tensor_parallel": 4, "gpus": 1.0, **fields}})


def nodes(monkeypatch: pytest.MonkeyPatch, *gpus: int) -> None:
    found = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": float(count)}} for count in gpus]
    dead = {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [*found, dead])


@pytest.mark.parametrize(
    ("placement", "gpus"),
    [("STRICT_PACK", (1, 4)), ("PACK", (2, 2)), ("SPREAD", (3, 1)), ("STRICT_SPREAD", (1, 1, 2, 1))],
)
def test_check_placement_with_enough_gpus_finds_room(
    monkeypatch: pytest.MonkeyPatch, placement: str, gpus: tuple[int, ...]
) -> None:
    nodes(monkeypatch, *gpus)
    check_placement(settings(placement=placement))


@pytest.mark.parametrize(
    ("placement", "gpus", "better"),
    [("STRICT_PACK", (3, 3), "PACK would"), ("STRICT_SPREAD", (2, 2), "SPREAD would")],
)
def test_lack_of_room_is_named(
    monkeypatch: pytest.MonkeyPatch, placement: str, gpus: tuple[int, ...], better: str
) -> None:
    nodes(monkeypatch, *gpus)
    with pytest.raises(ValueError, match=f"target.placement='{placement}'.*GPU.*{better}"):
        check_placement(settings(placement=placement))


def test_target_of_one_process_is_placed_by_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, 0)
    check_placement(settings(tensor_parallel=1))


def test_rank_asks_for_what_a_target_is_given() -> None:
    asked = rank_resources(settings(accelerator="H100", resources={"big": 2.0}).target)
    assert asked == {"GPU": 1.0, "accelerator_type:H100": 0.001, "big": 2.0}
    assert rank_resources(settings(gpus=0.0).target) == {"CPU": 0.001}  # a bundle must not be empty
