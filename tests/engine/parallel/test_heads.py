"""Heads beside a target of two ranks draft what they draft beside one of one, and the text is the same."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from outrider.demo.prompts import DEMO, DRAFTERS
from outrider.engine.drafters.beside_target import beside_target
from outrider.engine.engine import Engine
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loading.skeleton import skeleton
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache, allocated_weights
from tests.support.beside import Drafted, drafted_texts, plain_texts, rounds
from tests.support.eagle3 import write_eagle3
from tests.support.heads import write_medusa
from tests.support.mtp import write_target
from tests.support.ranks import Ranks

DEPTH, LEAVES = 4, 4
SHORT_PROMPTS = [tuple(range(3, length)) for length in (8, 30)]


def settings_of(drafter: str, head: Path | None, ranks: int = 2, **fields: Any) -> EngineSettings:
    given = {"dtype": "float32", "threads": 1, "cache_memory": 2**25, "self_check": False}
    named = {"model": str(DEMO / "target"), "drafter": drafter, "head": head and str(head)}
    return EngineSettings.model_validate({**given, **named, "tensor_parallel": ranks, **fields})


def draft(engine: Engine, temperature: float) -> list[Drafted]:
    return drafted_texts(engine, temperature, DEPTH, company=6, leaves=LEAVES)


def lead(group: RankGroup, settings: EngineSettings, temperatures: tuple[float, ...]) -> list[list[Drafted]]:
    engine = Engine.from_settings(settings, group)
    found = [draft(engine, temperature) for temperature in temperatures]
    engine.shut_down()
    return found


def follow_on(group: RankGroup, settings: EngineSettings, *_: object) -> None:
    follow(ForwardPass(settings, group), group)


def check(ranks: Ranks, drafter: str, head: Path, *temperatures: float) -> None:
    [shared, _] = ranks.run(lead, follow_on, settings_of(drafter, head), temperatures)
    alone = Engine.from_settings(settings_of(drafter, head, ranks=1))
    for temperature, found in zip(temperatures, shared, strict=True):
        assert [text.tokens for text in found] == plain_texts(temperature)
        assert [text.drafts for text in found] == [text.drafts for text in draft(alone, temperature)]
        assert sum(text.accepted for text in found) > 0


@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
@pytest.mark.parametrize("temperatures", [(0.7,), pytest.param((0.0, 1.0), marks=pytest.mark.slow)], ids=str)
def test_drafts_and_text_are_those_of_one_process(
    ranks: Ranks, drafter: str, temperatures: tuple[float, ...]
) -> None:
    """The trained heads share the target's embedding and projection, of which each rank has a half."""
    check(ranks, drafter, DRAFTERS / drafter, *temperatures)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_a_head_with_a_projection_of_its_own_needs_no_copy_of_the_targets(
    ranks: Ranks, tmp_path: Path, drafter: str
) -> None:
    head = write_eagle3(tmp_path) if drafter == "eagle3" else write_medusa(tmp_path)
    check(ranks, drafter, head, 0.7)


def lead_mtp(group: RankGroup, settings: EngineSettings) -> list[Drafted]:
    engine = Engine.from_settings(settings, group)
    found = rounds(engine, SHORT_PROMPTS, 0.7, DEPTH, LEAVES)
    engine.shut_down()
    return found


def test_an_mtp_layer_drafts_what_it_drafts_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    model = str(write_target(tmp_path, "qwen3"))
    [shared, _] = ranks.run(lead_mtp, follow_on, settings_of("mtp", None, model=model))
    alone = Engine.from_settings(settings_of("mtp", None, ranks=1, model=model))
    assert shared == rounds(alone, SHORT_PROMPTS, 0.7, DEPTH, LEAVES)
    assert sum(text.accepted for text in shared) > 0


def hold_leading(group: RankGroup, settings: EngineSettings) -> tuple[int, int, int]:
    """Blocks, and bytes of weights and cache, with the head's."""
    beside = beside_target(settings)
    forward = ForwardPass(settings, group, beside)
    weights, cache = allocated_weights(forward.model), allocated_cache(forward.cache)
    own: Any = beside
    parts = [own._heads] if settings.drafter == "medusa" else [own._head, own._embedding, own._projection]
    weights += allocated_weights(nn.ModuleList(parts))
    cache += 0 if settings.drafter == "medusa" else allocated_cache(own._cache)
    return forward.cache.pool.num_blocks, weights, cache


def hold(group: RankGroup, settings: EngineSettings) -> tuple[int, int, int]:
    forward = ForwardPass(settings, group)
    return forward.cache.pool.num_blocks, allocated_weights(forward.model), allocated_cache(forward.cache)


@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_rank_0_holds_what_is_planned_and_all_ranks_have_as_many_blocks(ranks: Ranks, drafter: str) -> None:
    settings = settings_of(drafter, DRAFTERS / drafter)
    plan = plan_memory(skeleton(settings), settings, 2**30)
    [(blocks, weights, cache), (others, less, least)] = ranks.run(hold_leading, hold, settings)
    assert blocks == others == plan.num_blocks
    assert cache == plan.cache >= least
    assert weights == pytest.approx(plan.weights, rel=0.01)
    assert weights > less


def test_a_drafter_that_cannot_stand_beside_ranks_is_refused_by_name() -> None:
    settings = settings_of("early_exit", DRAFTERS / "early_exit", early_exit=3)
    with pytest.raises(
        UnsupportedModelError, match=r"drafter='early_exit' .* tensor_parallel=2 is not served"
    ):
        Engine.from_settings(settings)
