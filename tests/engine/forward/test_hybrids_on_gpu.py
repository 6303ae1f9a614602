"""Recurrent layers on a simulated GPU: the texts of a CPU, and launches that do not grow with a prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding
from tests.support.checkpoints import DELTA_NETS, write_checkpoint
from tests.support.hybrid import in_rounds, plain, requests
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

LAYERS = ["linear_attention", "full_attention"]
SMALL: dict[str, dict[str, Any]] = {
    kind: {"num_hidden_layers": 2, "layer_types": LAYERS, "mlp_only_layers": []} for kind in DELTA_NETS
}
SMALL["nemotron_h"] = {"layers_block_type": [*LAYERS, "moe", "mlp"]}
pytestmark = [needs_compiler, pytest.mark.slow]  # an interpreter computes each token


def engine_of(folder: Path, device: str, **fields: Any) -> Engine:
    given = {"block_size": 8, "max_sequences": 3, "cache_memory": 2**16, "threads": 1, "self_check": False}
    return Engine.from_settings(
        EngineSettings.model_validate({"model": str(folder), "device": device, **given, **fields})
    )


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_texts_on_a_gpu_are_those_of_a_cpu_with_drafts(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind, **SMALL[kind])
    asked = [replace(each, prompt=tuple(range(3, 15))) for each in requests(1)]
    engine = engine_of(folder, "cpu")
    texts = [plain(engine, each) for each in asked]
    with simulated_cuda():
        on_gpu = engine_of(folder, "cuda", prefill_chunk=5)
        assert [plain(on_gpu, each) for each in asked] == texts
        assert in_rounds(on_gpu, asked, texts, seed=0)[0] == texts


def test_launches_of_a_prompt_do_not_grow_with_its_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5_text", num_hidden_layers=2, layer_types=LAYERS)
    with simulated_cuda() as cuda:
        engine = engine_of(folder, "cuda", max_sequences=1)
        (asked,) = requests(1)
        plain(engine, asked)
        launches = []
        for count in (9, 13):
            sequence = engine.open(count, asked.noise_key, asked.sampling)
            engine.submit(plain_decoding(sequence.number, 0, tuple(range(3 + count, 3 + 2 * count)), 1))
            before = cuda.counts.launches.total()
            engine.step()
            launches.append(cuda.counts.launches.total() - before)
            engine.close(sequence)
    assert launches[0] == launches[1]
