"""Ranks with a GPU each begin the next rounds on their devices, and say what one process says.

GPUs and NCCL are simulated: tests/support/simulated_cuda/README.md.
"""

from pathlib import Path
from typing import Any

import pytest

from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.leased_rounds import (
    PROMPTS,
    Asked,
    Text,
    rounds_begun,
    settings_of_pair,
    texts,
    without_tokenizers,
    write_pair,
)
from tests.support.ranks import Ranks
from tests.support.ranks_on_gpus import few_graphs, simulated
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = needs_compiler

ASKED = [Asked(PROMPTS[0]), Asked(PROMPTS[1], {"max_tokens": 9})]
ALTERNATIVES = 3


def leads(group: RankGroup, settings: EngineSettings) -> tuple[list[Text], int]:
    """Returns the texts, and how many steps began rounds."""
    with few_graphs(), without_tokenizers():
        engine = Engine.from_settings(settings, group)
    simulated().counts = Counts()
    found = texts(engine, ASKED, ALTERNATIVES)
    engine.shut_down()
    return found, rounds_begun(simulated())


def follows(group: RankGroup, settings: EngineSettings) -> tuple[int, int]:
    """Returns how many steps began rounds, and how often it waited for its device."""
    with few_graphs(), without_tokenizers():
        forward = load_forward_pass(settings, group, TargetDrafters.of(settings))
    simulated().counts = Counts()
    follow(forward, group)
    return rounds_begun(simulated()), simulated().counts.waits.total()


@pytest.mark.slow
def test_rounds_of_two_ranks_begin_on_their_devices(gpu_ranks: Ranks, tmp_path: Path) -> None:
    """Accepted nodes off the chain move in the cache of each rank."""
    folder = write_pair(tmp_path)
    fields: dict[str, Any] = {"block_size": 16, "prefill_chunk": 32}
    with without_tokenizers():
        expected = texts(Engine.from_settings(settings_of_pair(folder, **fields)), ASKED, ALTERNATIVES)
    shared = settings_of_pair(folder, device="cuda", tensor_parallel=2, **fields)
    [(found, begun), (followed, waits)] = gpu_ranks.run(leads, follows, shared)
    assert found == expected
    assert any(text.off_chain for text in found)
    assert begun == followed > 3
    assert not waits
