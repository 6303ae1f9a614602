"""Files whose numbers are no weights are refused by name: their text would be noise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.stored import check_unexpected
from outrider.engine.loading.weights import load_model
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint

FP8 = torch.float8_e4m3fn
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    return EngineSettings.model_validate({"model": str(folder), "device": "cpu", "dtype": "float32"})


def said(settings: EngineSettings, quantization: dict[str, Any]) -> None:
    file = Path(settings.model) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def stored(settings: EngineSettings, tensors: dict[str, torch.Tensor]) -> None:
    file = Path(settings.model) / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


@pytest.mark.parametrize("method", ["bitsandbytes", "nvfp4", "quark", "torchao", "nobody's", None])
def test_method_that_is_not_served_is_refused_with_those_that_are(
    settings: EngineSettings, method: str
) -> None:
    said(settings, {"quant_method": method, "load_in_8bit": True})
    for look in (skeleton, load_model):
        with pytest.raises(UnsupportedModelError, match=f"quant_method={method!r}.*awq, .*fp8.*mxfp4"):
            look(settings)


def test_config_that_does_not_say_what_modelopt_says_is_refused(settings: EngineSettings) -> None:
    (Path(settings.model) / "hf_quant_config.json").write_text("{}")
    for look in (skeleton, load_model):
        with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json .*no quantization_config"):
            look(settings)


def test_codes_of_one_byte_without_a_scale_are_refused(settings: EngineSettings) -> None:
    stored(settings, {f"{LAYER}.weight": torch.zeros(128, 64).to(FP8)})
    for look in (skeleton, load_model):
        with pytest.raises(UnsupportedModelError, match=f"{LAYER}.weight is stored in F8_E4M3"):
            look(settings)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scales", "qzeros"])
def test_scale_that_a_layer_does_not_take_is_refused(settings: EngineSettings, name: str) -> None:
    stored(settings, {f"{LAYER}.{name}": torch.ones(1)})
    with pytest.raises(UnsupportedModelError, match=rf"stores {LAYER}\.{name}, 1 such in all"):
        load_model(settings)


def test_scales_of_activations_and_of_layers_that_are_left_out_are_no_matter(
    settings: EngineSettings,
) -> None:
    stored(
        settings, {f"{LAYER}.input_scale": torch.ones(1), "model.layers.1.self_attn.k_scale": torch.ones(1)}
    )
    model = load_model(settings)
    check_unexpected(settings.model, model, ["model.layers.2.mlp.up_proj.weight_scale_inv"])


def test_codes_that_a_quantized_checkpoint_keeps_without_a_scale_are_refused(
    settings: EngineSettings,
) -> None:
    said(settings, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    stored(settings, {f"{LAYER}.weight": torch.zeros(128, 64).to(FP8)})
    for look in (skeleton, load_model):
        with pytest.raises(UnsupportedModelError, match=f"{LAYER} cannot be read: it has no weight_scale"):
            look(settings)


def test_codes_in_a_layout_that_is_not_known_are_refused(settings: EngineSettings) -> None:
    said(settings, {"quant_method": "fp8"})
    stored(settings, {f"{LAYER}.gate_up_proj": torch.zeros(128, 64).to(FP8)})
    for look in (skeleton, load_model):
        with pytest.raises(UnsupportedModelError, match=rf"{LAYER}\.gate_up_proj is stored in F8_E4M3, in a"):
            look(settings)
