"""A step that goes wrong on a target of two ranks costs the sequence that caused it, and no rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outrider.engine.errors import RankLostError
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Failed
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_runs import run, texts
from tests.support.model import model_of
from tests.support.poison import BLOCK, POISON, POISONED, PROMPTS, start, text_alone
from tests.support.ranks import Ranks

HARMS = ["raises at every rank", "NaN at rank 0", "NaN at rank 1"]


def harm(model: nn.Module, how: str, rank: int) -> None:
    """Whoever is fed the poison."""
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    if how == "raises at every rank":

        def raising(_: nn.Module, ids: tuple[torch.Tensor]) -> None:
            if (ids[0] == POISON).any():
                raise IndexError("tokens 216, 217")

        embedding.register_forward_pre_hook(raising)
    elif how == f"NaN at rank {rank}":

        def spoilt(_: nn.Module, ids: tuple[torch.Tensor], states: torch.Tensor) -> torch.Tensor:
            return states.masked_fill((ids[0] == POISON)[..., None], torch.nan)

        embedding.register_forward_hook(spoilt)


def lead(group: RankGroup, settings: EngineSettings, how: str) -> Any:
    engine = Engine.from_settings(settings, group)
    harm(model_of(engine), how, 0)
    expected = [text_alone(engine, prompt) for prompt in PROMPTS]
    sequences = [start(engine, prompt) for prompt in [*PROMPTS[:2], POISONED, *PROMPTS[2:]]]
    results = run(engine)
    failed = [
        ([each.number for each in sequences].index(result.sequence), result.reason)
        for result in results
        if isinstance(result, Failed)
    ]
    del sequences[2]
    said = texts(results, sequences)
    again = text_alone(engine, PROMPTS[0])
    for sequence in sequences:
        engine.close(sequence)
    load = engine.load()
    engine.shut_down()
    return expected, said, again, failed, load.free_blocks == load.total_blocks


def follow_to_the_end(group: RankGroup, settings: EngineSettings, how: str) -> str:
    forward = load_forward_pass(settings, group)
    harm(forward.model, how, 1)
    follow(forward, group)
    return "dismissed"


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("how", HARMS)
def test_only_the_sequence_that_harms_fails_and_both_ranks_stay(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    given = {"block_size": BLOCK, "cache_memory": 2**20, "dtype": "float32", "threads": 1}
    settings = EngineSettings.model_validate({"model": str(folder), "tensor_parallel": 2, **given})
    [(expected, said, again, failed, is_free), at_rank_1] = ranks.run(lead, follow_to_the_end, settings, how)
    ((place, reason),) = failed
    assert place == 2
    assert not any(number in reason for number in ("216", "217"))  # nothing of the prompt
    assert said == expected
    assert again == expected[0]
    assert is_free
    assert at_rank_1 == "dismissed"


def lead_until_left(group: RankGroup, settings: EngineSettings) -> str:
    engine = Engine.from_settings(settings, group)
    start(engine, POISONED)
    try:
        return f"goes on: {run(engine)}"
    except RankLostError as error:
        return str(error)


def follow_and_leave(group: RankGroup, settings: EngineSettings) -> None:
    forward = load_forward_pass(settings, group)

    def leaving(_: nn.Module, ids: tuple[torch.Tensor], states: torch.Tensor) -> None:
        if (ids[0] == POISON).any():
            os._exit(1)

    forward.model.get_input_embeddings().register_forward_hook(leaving)  # type: ignore[operator]
    follow(forward, group)


@pytest.mark.slow
def test_rank_that_leaves_in_the_middle_of_a_pass_is_not_the_sequences_fault(tmp_path: Path) -> None:
    """Which then goes on with another target."""
    folder = write_checkpoint(tmp_path, "llama")
    given = {"block_size": BLOCK, "cache_memory": 2**20, "dtype": "float32", "threads": 1}
    settings = EngineSettings.model_validate({"model": str(folder), "tensor_parallel": 2, **given})
    ranks = Ranks(2)
    try:
        assert "a rank of the group is gone" in ranks.lead(lead_until_left, follow_and_leave, settings)
    finally:
        ranks.close()
