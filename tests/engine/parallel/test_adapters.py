"""Ranks that share a model share its adapters, and say what one process says."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.adapters.adapters import Adapters
from outrider.engine.adapters.checkpoint import AdapterCheckpoint
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from outrider.engine.work import AskedAdapter
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.ranks import Ranks, follow_to_the_end
from tests.support.ranks_on_gpus import few_graphs, follow_on
from tests.support.simulated_cuda.install import needs_compiler

PROMPT = (5, 9, 33, 5, 9, 33, 5, 9)
REQUESTS = [
    OfflineRequest(PROMPT, Sampling(max_tokens=12, temperature=heat, ignore_eos=True), number, adapter)
    for number, (adapter, heat) in enumerate(
        (AskedAdapter(name), heat) for name in ("", "a", "b") for heat in (0.0, 0.7)
    )
]
OF_NONE = [(PROMPT, Sampling(max_tokens=12, temperature=heat, ignore_eos=True), 1) for heat in (0.0, 0.7)]


def texts(engine: Engine) -> list[tuple[int, ...]]:
    """Plainly, and with drafts."""
    drafted = generate(engine, IndexDrafter(NgramIndex), REQUESTS, 3)
    return [output.tokens for output in (*generate(engine, None, REQUESTS, 0), *drafted)]


def lead(group: RankGroup, settings: EngineSettings) -> Any:
    engine = Engine.from_settings(settings, group)
    said = texts(engine)
    engine.shut_down()
    return said


@pytest.mark.slow
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


def lead_loading(group: RankGroup, settings: EngineSettings) -> Any:
    """Returns texts with adapters that were loaded, with one in the place of the other, and refusals."""
    engine = Engine.from_settings(settings, group)
    said, refusals = [], []
    for name in (*"ab", "refused elsewhere", "b"):
        try:
            digest = engine.load_adapter(AskedAdapter(name, name))
        except UnsupportedModelError as refusal:
            refusals.append(str(refusal))
            continue
        asked = [OfflineRequest(*of_none, AskedAdapter(name, name, digest)) for of_none in OF_NONE]
        said += [output.tokens for output in generate(engine, None, asked, 0)]
        engine.drop_adapter(digest)
    engine.shut_down()
    return said, refusals


def follow_refusing(group: RankGroup, settings: EngineSettings) -> None:
    """Follows to the end at a rank whose files of one adapter are other files."""
    read = Adapters.read

    def refusing(adapters: Adapters, asked: AskedAdapter) -> AdapterCheckpoint:
        path = "a" if asked.name == "refused elsewhere" else asked.path
        return read(adapters, replace(asked, path=path))

    with patch.object(Adapters, "read", refusing):
        follow_to_the_end(group, settings)


def test_ranks_load_and_drop_adapters_together_or_not_at_all(ranks: Ranks, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    adapters = {
        name: str(write_adapter(tmp_path / "adapters" / name, model, seed))
        for seed, name in enumerate((*"ab", "refused elsewhere"))
    }
    usual = EngineSettings(
        model=str(model), block_size=4, cache_memory=2**20, dtype="float32", threads=1, max_loaded_adapters=1
    )
    folder = {"tensor_parallel": 2, "adapter_folder": str(tmp_path / "adapters")}
    (said, refusals), _ = ranks.run(lead_loading, follow_refusing, usual.model_copy(update=folder))
    alone = Engine.from_settings(
        usual.model_copy(update={"adapters": {name: adapters[name] for name in "ab"}})
    )
    asked = [OfflineRequest(*of_none, AskedAdapter(name)) for name in "abb" for of_none in OF_NONE]
    assert said == [output.tokens for output in generate(alone, None, asked, 0)]
    assert refusals == ["another rank of the target refuses it: its log says why"]


def lead_on_gpu(group: RankGroup, settings: EngineSettings) -> Any:
    """Returns texts with an adapter that was loaded after the graphs, and how the last step was computed."""
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    digest = engine.load_adapter(AskedAdapter("b", "b"))
    asked = [OfflineRequest(*of_none, AskedAdapter("b", "b", digest)) for of_none in OF_NONE]
    said = [output.tokens for output in generate(engine, None, asked, 0)]
    assert engine.last_step is not None
    engine.shut_down()
    return said, engine.last_step.path, engine.runner.slow_because


@pytest.mark.slow  # kernels are simulated
@needs_compiler
def test_ranks_on_gpus_compute_a_loaded_adapter_in_their_graphs(gpu_ranks: Ranks, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    path = write_adapter(tmp_path / "adapters" / "b", model, 1)
    usual = EngineSettings(model=str(model), cache_memory=2**21, dtype="float32", self_check=False, threads=1)
    alone = Engine.from_settings(usual.model_copy(update={"adapters": {"b": str(path)}}))
    asked = [OfflineRequest(*of_none, AskedAdapter("b")) for of_none in OF_NONE]
    folder = {"tensor_parallel": 2, "adapter_folder": str(tmp_path / "adapters"), "device": "cuda"}
    (said, path_of_step, slow_because), _ = gpu_ranks.run(
        lead_on_gpu, follow_on, usual.model_copy(update=folder)
    )
    assert said == [output.tokens for output in generate(alone, None, asked, 0)]
    assert path_of_step == "graph"
    assert slow_because == ()
