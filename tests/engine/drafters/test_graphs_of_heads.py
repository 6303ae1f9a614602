"""On a GPU an EAGLE-3 head and an MTP layer replay graphs, and draft what they draft on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import outrider.engine.forward.graphs
from outrider.engine.drafters.eagle3_head import Eagle3Head, Eagle3Shape
from outrider.engine.engine import Engine
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.settings import EngineSettings
from tests.support.beside import Drafted, rounds
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.gpu import gpu
from tests.support.mtp import write_target
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]  # Triton's interpreter takes its time

PROMPTS = [(5, 9, 33, 5, 9, 33, 5, 9), (77, 12, 4)]
DEPTH = 3


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(outrider.engine.forward.graphs, "ROWS", (1, 4, 16))
    return {"cache_memory": 2**21, "block_size": 8, "self_check": False, "dtype": "float32"}


@pytest.fixture
def settings(given: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    model = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
    head = write_head(tmp_path / "head", model)
    return {**given, "model": str(model), "drafter": "eagle3", "head": str(head)}


@pytest.fixture
def with_mtp(given: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {**given, "model": str(write_target(tmp_path, "qwen3")), "drafter": "mtp"}


def write_head(folder: Path, model: Path) -> Path:
    """Random: what it guesses is hardly ever right, and depends on all that it is fed."""
    folder.mkdir()
    layer: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    layer |= {"head_dim": 16, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5, "num_hidden_layers": 1}
    config = {**layer, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    named = EngineSettings(model=str(model), drafter="eagle3", head=str(folder))
    head = Eagle3Head(Eagle3Shape.of(HeadCheckpoint(named)), 64, None)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name.replace("layer.", "midlayer.").replace("attention.", "self_attn.", 1): torch.randn(
            tensor.shape, generator=generator
        )
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafted(settings: dict[str, Any], device: str, **more: Any) -> tuple[list[Drafted], Engine]:
    engine = Engine.from_settings(EngineSettings.model_validate({**settings, "device": device, **more}))
    return rounds(engine, PROMPTS, 0.7, DEPTH, leaves=2, max_tokens=10), engine


@pytest.mark.parametrize("drafter", ["settings", "with_mtp"])
def test_drafts_are_those_of_the_cpu_and_passes_are_replays(
    drafter: str, request: pytest.FixtureRequest
) -> None:
    settings = request.getfixturevalue(drafter)
    expected, _ = drafted(settings, "cpu")
    with gpu() as cuda:
        found, engine = drafted(settings, "cuda")
        assert not any("drafter" in reason for reason in engine.slow_because)
        if cuda is not None:  # of a real GPU launches are not counted
            cuda.counts = Counts()
            more = rounds(engine, PROMPTS[:1], 0.7, DEPTH, max_tokens=4)
            replays = sum(n for cause, n in cuda.counts.launches.items() if "graph.replay" in cause)
            drafts = [len(draft) for draft in more[0].drafts]
            # For each Verdict the target's, and the head's over what stands; then one for each node fed.
            assert replays == 2 * len(more[0].ranks) + sum(max(length - 1, 0) for length in drafts)
    assert [(one.tokens, one.drafts) for one in found] == [(one.tokens, one.drafts) for one in expected]
    assert any(not draft.is_chain for one in found for draft in one.drafts)


def test_without_graphs_it_drafts_the_same_and_says_that_it_is_slower(settings: dict[str, Any]) -> None:
    expected, _ = drafted(settings, "cpu")
    with gpu():
        found, engine = drafted(settings, "cuda", graphs=False)
    assert [(one.tokens, one.drafts) for one in found] == [(one.tokens, one.drafts) for one in expected]
    assert any("drafter beside the target have no CUDA graphs" in reason for reason in engine.slow_because)
