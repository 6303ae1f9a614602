"""Latents in the cache of a simulated GPU: the texts of a CPU, and steps that are replayed graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.hybrid import in_rounds, plain, requests
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.steps import counts_of_step

pytestmark = [needs_compiler, pytest.mark.slow]  # an interpreter computes each token
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe_lite": {**ARCHITECTURES["deepseek_v3"], "mlp_layer_types": ["dense", "sparse"]},
}


def engine_of(folder: Path, device: str, **fields: Any) -> Engine:
    given = {"block_size": 8, "max_sequences": 4, "cache_memory": 2**18, "threads": 1, "self_check": False}
    return Engine.from_settings(
        EngineSettings.model_validate({"model": str(folder), "device": device, **given, **fields})
    )


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_costs_on_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are those of a CPU, plainly and with Drafts; a step is one wait and a copy each way."""
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 8))
    folder = write_checkpoint(tmp_path, kind, num_hidden_layers=2, **KINDS[kind])
    asked = [replace(each, prompt=tuple(range(3, 40))) for each in requests(1)]
    engine = engine_of(folder, "cpu")
    texts = [plain(engine, each) for each in asked]
    with simulated_cuda():
        on_gpu = engine_of(folder, "cuda", prefill_chunk=34)
        assert on_gpu.runner.slow_because == ()
        assert {keys.shape[1:] for keys in on_gpu._cache.keys.values()} == {(1, 32 + 32)}
        assert allocated_cache(on_gpu._cache) == allocated_cache(engine._cache)
        assert [plain(on_gpu, each) for each in asked] == texts
        assert in_rounds(on_gpu, asked, texts, seed=0)[0] == texts
        counts = counts_of_step(on_gpu, 1, 3, Sampling(temperature=0.0, max_tokens=64, ignore_eos=True))
        assert on_gpu.last_step is not None
        assert on_gpu.last_step.path == "graph"
    totals = counts.totals()
    assert (totals["waits"], totals["pinned_copies"], totals["copies_out"]) == (1, 1, 1), counts.report()
    assert totals["pageable_copies"] == 0, counts.report()
