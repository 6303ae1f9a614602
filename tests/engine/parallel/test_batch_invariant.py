"""Models that processes share say the same alone, together and with Drafts, where numerics allow it."""

from pathlib import Path

import pytest

from outrider.decoding.settings import Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions
from tests.support.ranks import Ranks, follow_to_the_end

COUNT = 12


def texts_of_rank_0(group: RankGroup, shared: EngineSettings) -> list[list[tuple[int, ...]]]:
    """The same requests alone, together, and with drafts by the model itself."""
    target = Engine.from_settings(shared, group)
    drafter = DraftModel(Engine.from_settings(shared.model_copy(update={"tensor_parallel": 1})))
    asked = [
        OfflineRequest(tuple(range(5, 20 + number)), Sampling(temperature=1, max_tokens=COUNT), number)
        for number in range(10)
    ]
    ways = [
        [generate(target, None, [request], 0)[0] for request in asked],
        generate(target, None, asked, 0),
        generate(target, drafter, asked, 4, 3),
    ]
    target.shut_down()
    return [[output.tokens for output in way] for way in ways]


@needs_functions
@pytest.mark.slow
def test_four_processes_that_share_a_model_do_too(four_ranks: Ranks, tmp_path: Path) -> None:
    """Two key/value heads each, so that two ranks hold equal heads."""
    folder = write_checkpoint(tmp_path, "llama")
    fields = {"model": str(folder), "dtype": "bfloat16", "cache_memory": 2**22, "threads": 1}
    shared = EngineSettings.model_validate({**fields, "batch_invariant": True, "tensor_parallel": 4})
    [(alone, together, drafted), *_] = four_ranks.run(texts_of_rank_0, follow_to_the_end, shared)
    assert alone == together == drafted
    assert len(set(alone)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("bits", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_two_processes_may_share_a_quantized_model(ranks: Ranks, bits: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    fields = {"model": str(folder), "cache_memory": 2**22, "threads": 1, "quantization": bits}
    shared = EngineSettings.model_validate({**fields, "tensor_parallel": 2})
    [(alone, *_), _] = ranks.run(texts_of_rank_0, follow_to_the_end, shared)
    assert len(set(alone)) > 5
