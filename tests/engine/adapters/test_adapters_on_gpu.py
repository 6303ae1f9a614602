"""Adapters on a simulated GPU: CUDA graphs compute them, whichever are loaded when a graph is replayed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.forward import graphs
from outrider.engine.forward.graphs import CudaCapture
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import NONE_ASKED, AskedAdapter
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.steps import counts_of_step

pytestmark = [needs_compiler, pytest.mark.slow]  # kernels are simulated

PROMPT = (5, 9, 33, 5, 9, 33, 5, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of all layers, and two of some layers with other ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", model, 1)
    write_adapter(folder / "b", model, 2, layers=("q_proj", "v_proj", "down_proj"), rank=8)
    write_adapter(folder / "c", model, 3, layers=("k_proj", "o_proj"), rank=2)
    return folder


@pytest.fixture(autouse=True, scope="module")
def small_graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graphs, "CAPTURED_SIZES", (4, 40))
        yield


def engine_of(model: Path, **fields: Any) -> Engine:
    given = {"block_size": 4, "cache_memory": 2**20, "threads": 1, "self_check": False, **fields}
    return Engine.from_settings(EngineSettings.model_validate({"model": str(model), **given}))


def on_gpu(model: Path, **fields: Any) -> Engine:
    return engine_of(model, device="cuda", dtype="float16", prefill_chunk=1024, **fields)


def named(folder: Path) -> dict[str, str]:
    return {name: str(folder / name) for name in "abc"}


def requests(adapters: list[AskedAdapter]) -> list[OfflineRequest]:
    """Answers that end one after the other, so that the company of a row changes."""
    return [
        OfflineRequest(PROMPT, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True), 1, adapter)
        for tokens, adapter in zip((9, 3, 6, 8), adapters, strict=True)
    ]


def texts(engine: Engine, asked: list[OfflineRequest]) -> list[tuple[int, ...]]:
    """Returns the texts by plain decoding, after checking that each step replayed a graph if there is one."""
    taken = engine.step
    paths = set()

    def step() -> Any:
        results = taken()
        if engine.last_step is not None:
            paths.add(engine.last_step.path)
        return results

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "step", step)
        found = [output.tokens for output in generate(engine, None, asked, 0)]
    assert paths == {"graph" if engine.settings.graphs else "kernels"}
    return found


ASKED = [AskedAdapter("a"), NONE_ASKED, AskedAdapter("b"), AskedAdapter("c")]


def test_texts_of_mixed_adapters_are_those_without_graphs_and_those_of_a_cpu(
    model: Path, folder: Path
) -> None:
    asked, adapters = requests(ASKED), named(folder)
    on_cpu = engine_of(model, dtype="float32", adapters=adapters)
    expected = [output.tokens for output in generate(on_cpu, None, asked, 0)]
    assert len({text[:3] for text in expected}) == len(asked)
    with simulated_cuda():
        engine = on_gpu(model, adapters=adapters)
        assert texts(engine, asked) == expected
        assert [texts(engine, [request])[0] for request in asked] == expected
        drafted = generate(engine, IndexDrafter(NgramIndex), asked, 3)
        assert [output.tokens for output in drafted] == expected
        assert texts(on_gpu(model, adapters=adapters, graphs=False), asked) == expected


def test_step_costs_what_it_costs_without_adapters(model: Path, folder: Path) -> None:
    longer = Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
    with simulated_cuda():
        engine = on_gpu(model, adapters=named(folder))
        without = counts_of_step(engine, 3, 3, longer)
        assert without == counts_of_step(on_gpu(model), 3, 3, longer)
        adapted = counts_of_step(engine, 3, 3, longer, adapters=ASKED[:3])
    assert adapted.totals() == without.totals(), adapted.report()


def test_adapters_loaded_in_turn_are_computed_by_the_graphs_of_the_start(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, capture = [], CudaCapture.__call__

    def counted(capturing: CudaCapture, work: Any) -> Any:
        captured.append(work)
        return capture(capturing, work)

    monkeypatch.setattr(CudaCapture, "__call__", counted)
    sampling = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    with simulated_cuda():
        expected = {
            name: texts(engine, [OfflineRequest(PROMPT, sampling, 1, AskedAdapter(name))])
            for engine in [on_gpu(model, adapters=named(folder))]
            for name in "abc"
        }
        assert len({*map(tuple, expected.values())}) == 3
        engine = on_gpu(model, adapter_folder=str(folder), max_loaded_adapters=2)
        before = len(captured)
        for name in "abcab":
            asked = AskedAdapter(name, name, engine.load_adapter(AskedAdapter(name, name)))
            assert texts(engine, [OfflineRequest(PROMPT, sampling, 1, asked)]) == expected[name]
            if name == "b":
                engine.drop_adapter(asked.digest)
    assert len(captured) == before
