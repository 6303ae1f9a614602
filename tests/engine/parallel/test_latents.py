"""Ranks that share query heads cache the same latents, and say what one process says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.ranks import Ranks, follow_to_the_end
from tests.support.ranks_on_gpus import few_graphs, follow_on
from tests.support.simulated_cuda.install import needs_compiler

# A repeating prompt, so that n-grams find something to draft.
ASKED = [
    OfflineRequest((5, 9, 33, 5, 9, 33, 5, 9)[:length], Sampling(max_tokens=6, temperature=heat), length)
    for length, heat in ((8, 0.0), (3, 0.7))
]
KIND = {**ARCHITECTURES["deepseek_v3"], "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}


def texts(engine: Engine) -> list[list[tuple[int, ...]]]:
    """Plainly, and with drafts."""
    drafters = None, IndexDrafter(NgramIndex)
    return [
        [output.tokens for output in generate(engine, drafter, ASKED, 3 if drafter else 0)]
        for drafter in drafters
    ]


def answer(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    said = texts(engine)
    found = said, allocated_cache(engine._cache), {keys.shape[1:] for keys in engine._cache.keys.values()}
    engine.shut_down()
    return found


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_with_a_part_of_the_heads_each_cache_whole_latents(
    ranks: Ranks, gpu_ranks: Ranks, tmp_path: Path, device: str
) -> None:
    folder = write_checkpoint(tmp_path, "glm4_moe_lite", **KIND)
    given = {"model": str(folder), "dtype": "float32", "cache_memory": 2**20, "self_check": False}
    alone = EngineSettings.model_validate({**given, "device": "cpu", "threads": 1})
    shared = EngineSettings.model_validate({**given, "device": device, "threads": 1, "tensor_parallel": 2})
    run, follow = (gpu_ranks.run, follow_on) if device == "cuda" else (ranks.run, follow_to_the_end)
    (said, held, shapes), _ = run(answer, follow, shared)
    assert said == texts(Engine.from_settings(alone))
    assert shapes == {torch.Size((1, 32 + 32))}
    model = skeleton(shared)
    assert held == plan_memory(model, shared, 2**30).cache
    assert model.query_heads_of(2) == 2
