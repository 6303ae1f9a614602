"""Ranks that share a model share its adapters, and say what one process says."""

from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.ranks import Ranks, follow_to_the_end

PROMPT = (5, 9, 33, 5, 9, 33, 5, 9)
REQUESTS = [
    OfflineRequest(PROMPT, Sampling(max_tokens=12, temperature=heat, ignore_eos=True), number, adapter)
    for number, (adapter, heat) in enumerate((name, heat) for name in ("", "a", "b") for heat in (0.0, 0.7))
]


def texts(engine: Engine) -> list[tuple[int, ...]]:
    """Plainly, and with drafts."""
    drafted = generate(engine, IndexDrafter(NgramIndex), REQUESTS, 3)
    return [output.tokens for output in (*generate(engine, None, REQUESTS, 0), *drafted)]


def lead(group: RankGroup, settings: EngineSettings) -> Any:
    engine = Engine.from_settings(settings, group)
    said = texts(engine)
    engine.shut_down()
    return said


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_adapters_say_what_one_process_says(
    request: pytest.FixtureRequest, tmp_path: Path, size: int
) -> None:
    """Four ranks hold each of two key/value heads twice."""
    ranks: Ranks = request.getfixturevalue({2: "ranks", 4: "four_ranks"}[size])
    model = write_checkpoint(tmp_path / "model", "llama")
    adapters = {name: str(write_adapter(tmp_path / name, model, seed)) for seed, name in enumerate("ab")}
    alone = EngineSettings(
        model=str(model), block_size=4, cache_memory=2**20, dtype="float32", threads=1, adapters=adapters
    )
    shared = alone.model_copy(update={"tensor_parallel": size})
    said, *_ = ranks.run(lead, follow_to_the_end, shared)
    expected = texts(Engine.from_settings(alone))
    assert said == expected
    assert len({*expected}) == len(REQUESTS)
