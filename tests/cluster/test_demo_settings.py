"""Settings of the demo target, and what they become in engines and gateways."""

import pytest

from cluster.arguments import read_settings
from cluster.settings import DEMO_NAME, DEMO_PARALLEL, DEMO_SMALL, DEMO_SMALL_NAME
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from tests.support.demo_pair import DRAFTERS
from tests.support.settings_files import settings


def test_demo_target_is_served_at_a_realistic_cost_when_no_model_is_named() -> None:
    found = settings()
    assert found.target_engine().dtype == found.draft_engine("model").dtype == "float32"
    assert found.target_engine().model == str(written_out.target())
    assert found.draft_engine("model").model == str(DEMO / "draft")
    assert (found.gateway_settings().model, found.has_written_out_demo) == (DEMO_NAME, True)


def test_written_out_target_has_a_small_cache_unless_another_is_named() -> None:
    assert settings().target_engine().cache_memory == 2**28
    assert read_settings({"target.cache_memory": "1000000"}).target_engine().cache_memory == 10**6


def test_gateway_of_the_written_out_target_reads_the_tokenizer_that_every_node_has() -> None:
    assert settings().gateway_settings().tokenizer == str(DEMO / "target")


def test_small_demo_target_is_served_as_it_was_trained() -> None:
    found = settings(target=DEMO_SMALL)
    assert found.target_engine().dtype == found.draft_engine("model").dtype == "float32"
    assert found.target_engine().model == found.gateway_settings().tokenizer == str(DEMO / "target")
    assert found.draft_engine("model").model == str(DEMO / "draft")
    assert (found.gateway_settings().model, found.has_written_out_demo) == (DEMO_SMALL_NAME, False)


def test_demo_pair_accepts_any_setting() -> None:
    found = read_settings({"target.dtype": "bfloat16", "drafts.model.threads": "2"})
    assert (found.target_engine().dtype, found.draft_engine("model").dtype) == ("bfloat16", "float32")
    assert (found.draft_engine("model").model, found.draft_engine("model").threads) == (
        settings().draft_engine("model").model,
        2,
    )


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "medusa"])
def test_demo_target_has_heads_by_name(drafter: str) -> None:
    setting = f"target.drafters.{drafter}"
    found = read_settings({"target": DEMO_SMALL, setting: "{}"})
    assert found.target_engine().drafters[drafter].checkpoint == str(DRAFTERS / drafter)
    assert (found.drafts, found.drafters) == ({}, (drafter,))
    own = read_settings({"target": DEMO_SMALL, f"{setting}.checkpoint": "own"})
    assert own.target.drafters[drafter].checkpoint == "own"
    assert read_settings({"target": "folder", setting: "{}"}).target.drafters[drafter].checkpoint is None


def test_written_out_demo_target_has_heads_of_its_size_by_name() -> None:
    found = read_settings({"target.drafters.eagle3": "{}", "target.drafters.colocated.checkpoint": "own"})
    checkpoints = {name: own.checkpoint for name, own in found.target_engine().drafters.items()}
    assert checkpoints == {"eagle3": str(written_out.target().with_name("eagle3")), "colocated": "own"}


@pytest.mark.parametrize(("gpus", "drafts"), [(0, ["model"]), (1, [])])
def test_written_out_demo_target_has_its_head_beside_the_draft_model(gpus: int, drafts: list[str]) -> None:
    found = settings().with_gpus(gpus)
    assert [*found.target.drafters] == ["colocated", "dflash"]
    assert found.target.drafters["dflash"].checkpoint == str(written_out.target().with_name("dflash"))
    assert [*found.drafts] == drafts
    assert [*settings(target=DEMO_SMALL).with_gpus(gpus).target.drafters] == ["colocated"]


def test_demo_target_has_a_parallel_draft_by_name() -> None:
    found = read_settings({"draft": DEMO_PARALLEL}).draft_engine("model")
    assert (found.model, found.dtype) == (str(DRAFTERS / "parallel"), "float32")
