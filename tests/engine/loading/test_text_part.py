"""Checkpoints for images beside text: the text part is loaded alone, and says what the whole model says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import ARCHITECTURES, COMMON
from tests.support.quantized_checkpoints import quantize

IDS = torch.tensor([[5, 9, 33, 17]])
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral3": (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {
            "text_config": {**COMMON, **ARCHITECTURES["mistral"], "model_type": "mistral"},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        },
    ),
    "gemma3": (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {
            "text_config": {**COMMON, **ARCHITECTURES["gemma3_text"]},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        {
            "text_config": {
                **COMMON,
                "head_dim": 16,
                "global_head_dim": 16,
                "sliding_window": 24,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
            },
            "vision_config": VISION,
        },
    ),
}


def write(folder: Path, kind: str, **fields: Any) -> tuple[Path, torch.Tensor]:
    """A checkpoint of the whole model, and its logits of text."""
    torch.manual_seed(0)
    config, model_class, given = KINDS[kind]
    model = model_class(config(**given, **fields)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.15)
        logits = model(input_ids=IDS).logits
    model.save_pretrained(folder)
    return folder, logits


def settings_of(folder: Path) -> EngineSettings:
    return EngineSettings(model=str(folder), dtype="float32", device="cpu", cache_memory=2**20)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_part_computes_what_the_whole_model_computes(tmp_path: Path, kind: str, is_tied: bool) -> None:
    folder, expected = write(tmp_path, kind, tie_word_embeddings=is_tied)
    model = load_model(settings_of(folder))
    assert not any("vision" in name for name, _ in model.named_modules())
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=1e-4)
    planned = skeleton(settings_of(folder)).weight_bytes(on_cuda=True)
    assert allocated_weights(model) == pytest.approx(planned, rel=1e-4)


def test_text_part_of_a_known_architecture_takes_the_fast_decoder(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "mistral3")
    assert load_forward_pass(settings_of(folder))._decoder is not None


@pytest.mark.parametrize("name", ["compressed fp8", "compressed int4"])
def test_quantized_text_part_computes_what_its_weights_stand_for(tmp_path: Path, name: str) -> None:
    folder, _ = write(tmp_path / "whole", "mistral3")
    quantized, meant = quantize(folder, name, tmp_path)
    with torch.inference_mode():
        logits, expected = (load_model(settings_of(each))(IDS).logits for each in (quantized, meant))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def stray(tensors: dict[str, torch.Tensor]) -> None:
    tensors["speech.weight"] = torch.ones(1)


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["language_model.model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(stray, r"has, beside known parts, speech\.weight"), (missing, r"lacks model\.norm\.weight")],
)
def test_text_part_that_is_not_what_its_config_says_is_refused(
    tmp_path: Path, change: Any, reason: str
) -> None:
    folder, _ = write(tmp_path, "mistral3")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"its text part {reason}, 1 such in all"):
        load_model(settings_of(folder))
