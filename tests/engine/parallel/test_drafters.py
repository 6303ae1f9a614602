"""Drafters that two ranks share draft what they draft in one process, and the text is the same."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.demo.prompts import DEMO
from outrider.engine.drafters import early_exit, exit_search
from outrider.engine.drafters.shared_head import SharedHead
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache, allocated_weights
from tests.support.demo_pair import DRAFTERS, prompt_of
from tests.support.dflash import Form as BlockForm
from tests.support.dflash import write_dflash
from tests.support.eagle3 import P_EAGLE, Form, write_eagle3
from tests.support.heads import write_medusa
from tests.support.mtp import write_target
from tests.support.ranks import Ranks
from tests.support.target_drafters import (
    Drafted,
    drafted_texts,
    drafter_of,
    drafters_with,
    plain_texts,
    rounds,
)

DEPTH, ALTERNATIVES = 4, 4
SHORT_PROMPTS = [tuple(range(3, length)) for length in (8, 30)]


def settings_of(
    drafter: str, head: Path | None, ranks: int = 2, own: dict[str, Any] | None = None, **fields: Any
) -> EngineSettings:
    given = {"dtype": "float32", "threads": 1, "cache_memory": 2**25, "self_check": False}
    named = {"model": str(DEMO / "target"), **drafters_with(drafter, head, **own or {})}
    return EngineSettings.model_validate({**given, **named, "tensor_parallel": ranks, **fields})


def draft(engine: Engine, temperature: float) -> list[Drafted]:
    return drafted_texts(engine, temperature, DEPTH, company=6, alternatives=ALTERNATIVES)


def lead(group: RankGroup, settings: EngineSettings, temperatures: tuple[float, ...]) -> list[list[Drafted]]:
    engine = Engine.from_settings(settings, group)
    found = [draft(engine, temperature) for temperature in temperatures]
    engine.shut_down()
    return found


def follow_on(group: RankGroup, settings: EngineSettings, *_: object) -> None:
    follow(load_forward_pass(settings, group, TargetDrafters.of(settings)), group)


def check(ranks: Ranks, drafter: str, head: Path | None, *temperatures: float, **fields: Any) -> None:
    [shared, _] = ranks.run(lead, follow_on, settings_of(drafter, head, **fields), temperatures)
    alone = Engine.from_settings(settings_of(drafter, head, ranks=1, **fields))
    for temperature, found in zip(temperatures, shared, strict=True):
        assert [text.tokens for text in found] == plain_texts(temperature)
        assert [text.drafts for text in found] == [text.drafts for text in draft(alone, temperature)]
        assert sum(text.accepted for text in found) > 0


@pytest.mark.slow
def test_colocated_model_at_rank_0_drafts_what_it_drafts_in_one_process(ranks: Ranks) -> None:
    check(ranks, "colocated", DEMO / "draft", 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
@pytest.mark.parametrize("temperatures", [(0.7,), pytest.param((0.0, 1.0), marks=pytest.mark.slow)], ids=str)
def test_drafts_and_text_are_those_of_one_process(
    ranks: Ranks, drafter: str, temperatures: tuple[float, ...]
) -> None:
    """The trained heads have no vocabulary but the target's, of which each rank has a half."""
    check(ranks, drafter, DRAFTERS / drafter, *temperatures)


@pytest.mark.slow
def test_block_draft_of_two_ranks_drafts_what_it_drafts_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Its own vocabulary is shared, and knows a part of the target's."""
    check(ranks, "dflash", write_dflash(tmp_path, BlockForm(tokens=300)), 0.7)


@pytest.mark.slow
def test_p_eagle_head_of_two_ranks_drafts_what_it_drafts_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has a share of both layers, and of the head's own vocabulary."""
    check(ranks, "peagle", write_eagle3(tmp_path, P_EAGLE), 0.7)


def lead_both(group: RankGroup | None, settings: EngineSettings) -> dict[str, list[Drafted]]:
    """Returns texts by the drafter that drafted them."""
    engine = Engine.from_settings(settings, group)
    drafters = [*settings.drafters]
    found = {name: drafted_texts(engine, 0.7, DEPTH, company=6, drafter=name) for name in drafters}
    engine.shut_down()
    return found


@pytest.mark.slow
def test_each_of_two_heads_drafts_from_its_own_share(ranks: Ranks) -> None:
    heads = {name: {"checkpoint": str(DRAFTERS / name)} for name in ("medusa", "eagle3")}
    shared, alone = (settings_of("medusa", None, count, drafters=heads) for count in (2, 1))
    [found, _] = ranks.run(lead_both, follow_on, shared)
    expected = lead_both(None, alone)
    for name in heads:
        assert [text.tokens for text in found[name]] == plain_texts(0.7)
        assert [text.drafts for text in found[name]] == [text.drafts for text in expected[name]]
        assert sum(text.accepted for text in found[name]) > 0
    assert [text.drafts for text in found["medusa"]] != [text.drafts for text in found["eagle3"]]


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (DRAFTERS / "early_exit", {"layers": 3}),
        pytest.param(None, {"layers": 4}, marks=pytest.mark.slow),
        pytest.param(None, {"skipped_layers": (2, 4)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_part_of_the_target_drafts_from_all_ranks_caches(
    ranks: Ranks, head: Path | None, part: dict[str, Any]
) -> None:
    """What a branch that stood left to be moved is moved at each rank before the part reads it."""
    check(ranks, "early_exit", head, 0.7, own=part)


def lead_search(group: RankGroup, settings: EngineSettings) -> tuple[list[list[Drafted]], Any]:
    """A search that takes all the time there is, and little of it; and the layers that it has found."""
    with patch.object(early_exit, "TRIAL_SHARE", 1e9), patch.object(exit_search, "POSITIONS", 48):
        engine = Engine.from_settings(settings, group)
        found = [draft(engine, 0.7) for _ in range(4)]
    drafter = drafter_of(engine)
    engine.shut_down()
    return found, drafter._layers


@pytest.mark.slow
def test_part_that_pays_is_searched_by_all_ranks_together(ranks: Ranks) -> None:
    [(found, layers), _] = ranks.run(lead_search, follow_on, settings_of("early_exit", None))
    assert layers is not None
    assert not any(draft for text in found[0][:1] for draft in text.drafts[:1])
    for texts in found:
        assert [text.tokens for text in texts] == plain_texts(0.7)
    assert sum(text.accepted for text in found[-1]) > 0


def eagle3_with_all_of_its_own(folder: Path) -> Path:
    """A reduced vocabulary, of which the second rank has a token less, and an embedding."""
    head = write_eagle3(folder, Form(tokens=301))
    own = load_file(DEMO / "target" / "model.safetensors")["model.embed_tokens.weight"]
    save_file(
        {**load_file(head / "model.safetensors"), "embed_tokens.weight": own}, head / "model.safetensors"
    )
    return head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "write"),
    [("eagle3", write_eagle3), ("eagle3", eagle3_with_all_of_its_own), ("medusa", write_medusa)],
)
def test_head_with_a_vocabulary_of_its_own_shares_that(
    ranks: Ranks, tmp_path: Path, drafter: str, write: Callable[[Path], Path]
) -> None:
    check(ranks, drafter, write(tmp_path), 0.7)


def lead_after_plain_decoding(group: RankGroup | None, settings: EngineSettings) -> list[Drafted]:
    engine = Engine.from_settings(settings, group)
    found = rounds(engine, [prompt_of("json")], 0.7, DEPTH, plain=(3, 22))
    engine.shut_down()
    return found


def test_head_takes_in_what_waited_for_it_at_all_ranks(ranks: Ranks) -> None:
    shared, alone = (settings_of("eagle3", DRAFTERS / "eagle3", count) for count in (2, 1))
    [found, _] = ranks.run(lead_after_plain_decoding, follow_on, shared)
    assert found == lead_after_plain_decoding(None, alone)
    assert any(found[0].drafts[-3:])


def lead_mtp(group: RankGroup, settings: EngineSettings) -> list[Drafted]:
    engine = Engine.from_settings(settings, group)
    found = rounds(engine, SHORT_PROMPTS, 0.7, DEPTH, ALTERNATIVES)
    engine.shut_down()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_5_text",
        "qwen3",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("glm4_moe", "deepseek_v3")),
    ],
)
def test_mtp_layer_drafts_what_it_drafts_in_one_process(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Attention over compressed keys stays whole at each rank."""
    model = str(write_target(tmp_path, kind))
    [shared, _] = ranks.run(lead_mtp, follow_on, settings_of("mtp", None, model=model))
    alone = Engine.from_settings(settings_of("mtp", None, ranks=1, model=model))
    assert shared == rounds(alone, SHORT_PROMPTS, 0.7, DEPTH, ALTERNATIVES)
    assert sum(text.accepted for text in shared) > 0


@dataclass(frozen=True)
class Held:
    """Numbers of what one rank holds."""

    blocks: int
    weights: int  # bytes, with the head's, as cache
    cache: int
    cached_heads: int  # heads that the head's layer caches


def hold(group: RankGroup, settings: EngineSettings) -> Held:
    forward = load_forward_pass(settings, group, TargetDrafters.of(settings))
    own: Any
    (own,) = forward.drafters
    parts = {"medusa": "_heads", "eagle3": "_head", "mtp": "_model"}
    part = getattr(own, parts[own.info.name])
    weights = allocated_weights(nn.ModuleList([forward.model, part]))
    cache, cached_heads = allocated_cache(forward.cache), 0
    if own.cache_shapes:
        cache += allocated_cache(own._cache)
        cached_heads = own._cache.keys[0].shape[1]
    return Held(forward.cache.pool.num_blocks, weights, cache, cached_heads)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("drafter", "kind", "cached_heads"),
    [("eagle3", None, 4), ("medusa", None, 0), ("mtp", "qwen3", 2), ("mtp", "glm4_moe", 2)],
)
def test_each_rank_holds_its_share_as_planned(
    ranks: Ranks, tmp_path: Path, drafter: str, kind: str | None, cached_heads: int
) -> None:
    """kind: of a target with experts or without. cached_heads: of the whole head."""
    if kind is not None:
        settings = settings_of(drafter, None, model=str(write_target(tmp_path, kind)))
    else:
        settings = settings_of(drafter, DRAFTERS / drafter)
    plan = plan_memory(skeleton(settings), settings, 2**30)
    for held in ranks.run(hold, hold, settings):
        assert (held.blocks, held.cache) == (plan.num_blocks, plan.cache)
        assert held.weights == pytest.approx(plan.weights, rel=0.01)
        assert held.cached_heads == cached_heads / 2


def test_rank_plans_with_a_share_of_what_can_be_divided(tmp_path: Path) -> None:
    """All of a Medusa head but its layers, which are small; of EAGLE-3 all but what joins three states."""
    heads = {"medusa": write_medusa(tmp_path / "medusa"), "eagle3": write_eagle3(tmp_path / "eagle3")}
    whole = {"medusa": 4 * (256 + 1) * 256, "eagle3": 3 * 256 * 256}
    for drafter, head in heads.items():
        alone, shared = (TargetDrafters.of(settings_of(drafter, head, ranks)) for ranks in (1, 2))
        left = 4 * whole[drafter]
        assert shared.weight_bytes - left == pytest.approx((alone.weight_bytes - left) / 2, rel=0.01)


def leave(_: SharedHead, step: DrafterStep) -> None:
    os._exit(1)


def follow_until_a_draft(group: RankGroup, settings: EngineSettings) -> None:
    with patch.object(SharedHead, "follow", leave):
        follow_on(group, settings)


def lead_until_lost(group: RankGroup, settings: EngineSettings) -> str:
    engine = Engine.from_settings(settings, group)
    try:
        draft(engine, 0.7)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.slow
def test_rank_that_is_lost_while_it_drafts_ends_the_group() -> None:
    """A group without Drafts would wait for the lost rank in the target's next step."""
    two = Ranks(2)
    try:
        settings = settings_of("eagle3", DRAFTERS / "eagle3")
        assert two.lead(lead_until_lost, follow_until_a_draft, settings) == "RankLostError"
    finally:
        two.close()
