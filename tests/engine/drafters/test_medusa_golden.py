"""The logits of Medusa heads against those of vLLM, kept by golden/make_medusa.py."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider.engine.drafters.medusa import Medusa
from tests.support.medusa import HEADS, LAYERS, golden_states, golden_tensors
from tests.support.target_drafters import drafter_of, engine_with

GOLDEN = load_file(Path(__file__).parent / "golden" / "medusa.safetensors")


@torch.inference_mode()
def test_logits_are_those_of_vllm(tmp_path: Path) -> None:
    torch.save(golden_tensors(), tmp_path / "medusa_lm_head.pt")
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = engine_with("medusa", tmp_path, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, Medusa)
    logits = torch.stack([head(golden_states()) for head in drafter._heads])
    torch.testing.assert_close(logits, GOLDEN["logits"], atol=1e-4, rtol=1e-4)
