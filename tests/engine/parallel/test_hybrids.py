"""Ranks share recurrent layers by their heads, and say what one process says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.shares import check_shares
from outrider.engine.loop.engine import Engine
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache
from tests.support.checkpoints import DELTA_NETS, write_checkpoint
from tests.support.hybrid import Asked, in_rounds, plain, requests
from tests.support.ranks import Ranks, follow_to_the_end

COUNT = 8  # requests, some of which begin alike
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "qwen3_5_moe_text")) for kind in DELTA_NETS]


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    """So little cache that sequences are preempted, so small chunks that prompts take several steps."""
    given = {"block_size": 8, "cache_memory": 2**15, "max_sequences": 4, "prefill_chunk": 16, "threads": 1}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def lead(
    group: RankGroup, settings: EngineSettings, asked: Sequence[Asked]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int, int]:
    """Texts alone and in rounds of a rank's engine, its preemptions, and the bytes of its cache."""
    engine = Engine.from_settings(settings, group)
    alone = [plain(engine, each) for each in asked]
    together, preemptions = in_rounds(engine, asked, alone, seed=0)
    held = allocated_cache(engine._cache)
    engine.shut_down()
    return alone, together, preemptions, held


def texts_of_one_process(folder: Path, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
    engine = Engine.from_settings(settings_of(folder, cache_memory=2**17))
    return [plain(engine, each) for each in asked]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_a_hybrid_say_what_one_process_says_whatever_happens(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    folder, asked = write_checkpoint(tmp_path, kind), requests(COUNT)
    settings = settings_of(folder, tensor_parallel=2)
    [(alone, together, preemptions, held), _] = ranks.run(lead, follow_to_the_end, settings, asked)
    assert alone == texts_of_one_process(folder, asked)
    assert together == alone
    assert preemptions > 1
    assert held == plan_memory(skeleton(settings), settings, 2**30).cache


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("kind", [*DELTA_NETS])
def test_four_ranks_of_a_hybrid_say_what_one_process_says(
    four_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    folder = write_checkpoint(tmp_path, kind, linear_num_key_heads=4, linear_num_value_heads=8)
    settings, asked = settings_of(folder, tensor_parallel=4), requests(COUNT)
    [(alone, together, _, _), *_] = four_ranks.run(lead, follow_to_the_end, settings, asked)
    assert alone == texts_of_one_process(folder, asked)
    assert together == alone


def test_ranks_that_would_tear_a_head_of_recurrent_layers_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5_text", num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"has linear_num_key_heads=2.*give a divisor of 2"):
        check_shares(settings_of(folder, tensor_parallel=4))
