"""Checkpoints that are quantized already: each format says what its weights stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.decoding.settings import Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.linear import StoredLinear
from outrider.engine.loading import stored
from outrider.engine.loading.stored_checkpoint import TYPES
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import FORMATS, quantize, quantize_experts

REQUESTS = [
    OfflineRequest(prompt, Sampling(max_tokens=16, temperature=heat), 7)
    for prompt, heat in (((5, 9, 33, 17), 0.0), ((8, 21), 0.9))
]
IDS = torch.tensor([REQUESTS[0].prompt])
LAYER = "model.layers.1.mlp.up_proj"


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"dtype": "float32", "device": "cpu", "threads": 1, "cache_memory": 2**20}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def texts(folder: Path, draft: Path | None = None) -> list[tuple[int, ...]]:
    engine = Engine.from_settings(settings_of(folder))
    drafter = None if draft is None else DraftModel(Engine.from_settings(settings_of(draft, is_draft=True)))
    return [output.tokens for output in generate(engine, drafter, REQUESTS, 0 if draft is None else 3)]


def stored_layers(model: Any) -> list[StoredLinear]:
    return [module for module in model.modules() if isinstance(module, StoredLinear)]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", FORMATS)
def test_format_keeps_its_codes_and_computes_what_they_stand_for(tmp_path: Path, name: str) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    settings = settings_of(quantized)
    model = load_model(settings)
    with torch.inference_mode():
        logits = model(IDS).logits
        expected = AutoModelForCausalLM.from_pretrained(meant)(IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
    layers = stored_layers(model)
    assert len(layers) == 3 * 7
    assert all(layer.weight.codes.dtype == torch.uint8 for layer in layers)
    assert allocated_weights(model) == skeleton(settings).weight_bytes(on_cuda=False)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", ["fp8", "compressed int4", "modelopt nvfp4"])
def test_text_of_a_quantized_target_is_that_of_its_weights_with_and_without_drafts(
    tmp_path: Path, name: str
) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    expected = texts(meant)
    assert texts(quantized) == expected
    assert texts(quantized, meant) == expected
    assert texts(meant, quantized) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantized_target_checks_itself_in_16_bit(tmp_path: Path, dtype: str) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    engine = Engine.from_settings(settings_of(quantized, dtype=dtype))
    assert [len(output.tokens) for output in generate(engine, None, REQUESTS, 0)] == [16, 16]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", ["fp8", "compressed int4", "compressed nvfp4", "gptq"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_stay_as_they_are_stored(tmp_path: Path, kind: str, name: str) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", kind), name, tmp_path)
    model = load_model(settings_of(quantized))
    experts = model.model.layers[1].mlp.experts
    expected = AutoModelForCausalLM.from_pretrained(meant).model.layers[1].mlp.experts
    for number, (gate_up, down) in enumerate(experts.products):
        torch.testing.assert_close(gate_up.weight.widened(), expected.gate_up_proj[number])
        torch.testing.assert_close(down.weight.widened(), expected.down_proj[number])
    assert len(stored_layers(model)) == 3 * (4 + 2 * 4)
    assert allocated_weights(model) == skeleton(settings_of(quantized)).weight_bytes(on_cuda=False)


@pytest.mark.parametrize("name", ["fp8", "compressed int4"])
def test_text_of_stored_experts_is_that_of_their_numbers(tmp_path: Path, name: str) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "qwen3_moe"), name, tmp_path)
    assert texts(quantized) == texts(meant)


def test_experts_of_gpt_oss_stay_as_they_are_stored(tmp_path: Path) -> None:
    quantized, meant = quantize_experts(write_checkpoint(tmp_path / "plain", "gpt_oss"), tmp_path)
    assert texts(quantized) == texts(meant)
    loaded = load_model(settings_of(quantized))
    assert len(stored_layers(loaded)) == 3 * 2 * 4
    assert allocated_weights(loaded) == skeleton(settings_of(quantized)).weight_bytes(on_cuda=False)


def test_experts_of_a_model_without_a_description_are_widened_as_they_load(tmp_path: Path) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "afmoe"), "fp8", tmp_path)
    experts = load_model(settings_of(quantized)).model.layers[1].mlp.experts
    expected = AutoModelForCausalLM.from_pretrained(meant).model.layers[1].mlp.experts
    torch.testing.assert_close(experts.gate_up_proj, expected.gate_up_proj)
    torch.testing.assert_close(experts.down_proj, expected.down_proj)


def test_experts_of_other_sizes_than_the_config_says_are_refused(tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "qwen3_moe"), "compressed fp8", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    for key in [*tensors]:
        if ".experts." in key and "gate_proj" in key:
            tensors[key] = tensors[key][:-16].clone()
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"experts of model\.layers\.0\.mlp are not stored in the sizes"
    ):
        load_model(settings_of(quantized))


def test_biases_of_quantized_layers_are_added(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", "qwen2")
    file = folder / "model.safetensors"
    tensors = {
        key: torch.ones_like(weight) if key.endswith("bias") else weight
        for key, weight in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    quantized, meant = quantize(folder, "compressed fp8", tmp_path)
    assert texts(quantized) == texts(meant)


def test_ends_of_sequence_come_from_the_generation_config(tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    (quantized / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_model(settings_of(quantized)).generation_config.eos_token_id == [3, 4]


def without(tensors: dict[str, Tensor], end: str) -> None:
    del tensors[f"{LAYER}{end}"]


def of_other_shape(tensors: dict[str, Tensor], end: str) -> None:
    tensors[f"{LAYER}{end}"] = tensors[f"{LAYER}{end}"][:-1].clone()


def in_order_of_activation(tensors: dict[str, Tensor], end: str) -> None:
    tensors[f"{LAYER}{end}"] = tensors[f"{LAYER}{end}"].flip(0).contiguous()


def with_an_order(tensors: dict[str, Tensor], end: str) -> None:
    tensors[f"{LAYER}{end}"] = torch.arange(64, dtype=torch.int32).flip(0) // 32


def in_other_floats(tensors: dict[str, Tensor], end: str) -> None:
    tensors[f"{LAYER}{end}"] = tensors[f"{LAYER}{end}"].float().to(torch.float8_e5m2)


Change = Callable[[dict[str, Tensor], str], None]
WRONG: dict[str, tuple[str, Change, str, str]] = {
    "no scale": ("fp8", without, ".weight_scale_inv", r"up_proj cannot be read: it has no weight_scale"),
    "no codes": ("fp8", without, ".weight", rf"{LAYER}\.weight is missing, 1 such in all"),
    "scales of other blocks": (
        "fp8",
        of_other_shape,
        ".weight_scale_inv",
        r"its scales are \[7, 4\] and must be \[8, 4\]",
    ),
    "fewer outputs": ("compressed fp8, one scale", of_other_shape, ".weight", r"\(127, 64\) and must be"),
    "order of activation": ("gptq", in_order_of_activation, ".g_idx", "order of activations .desc_act"),
    "order of compressed-tensors": (
        "compressed int4",
        with_an_order,
        ".weight_g_idx",
        "order of activations .desc_act, actorder",
    ),
    "other floats": ("fp8", in_other_floats, ".weight", r"its codes are torch\.float8_e5m2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_layer_that_is_not_stored_as_its_format_says_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, change, end, reason = WRONG[case]
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors, end)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"model='{quantized}': .*{reason}"):
        load_model(settings_of(quantized))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("awq", {"version": "gemv"}, "version='gemv' of AWQ is not served, 'gemm' is"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not served, 'gptq' and"),
    ],
)
def test_layout_that_is_not_served_is_refused_with_those_that_are(
    tmp_path: Path, name: str, change: dict[str, str], reason: str
) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"].update(change)
    (quantized / "config.json").write_text(json.dumps(config))
    for look in (skeleton, load_model):
        with pytest.raises(UnsupportedModelError, match=reason):
            look(settings_of(quantized))


def test_layer_of_other_bits_is_refused(tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), "gptq", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{LAYER}.qweight"] = tensors[f"{LAYER}.qweight"][:6].clone()
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="its codes have 3 bits, and 4 and 8 are read"):
        load_model(settings_of(quantized))


def test_plan_of_a_cpu_counts_the_layer_that_is_widened(tmp_path: Path) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    mlp = 3 * 64 * 128  # numbers
    assert skeleton(settings_of(quantized)).widened_bytes() == 2 * 4 * mlp
    assert skeleton(settings_of(meant)).widened_bytes() == 0
    plans = [
        plan_memory(skeleton(settings), settings, 2**34).activations
        for settings in (settings_of(quantized), settings_of(meant))
    ]
    assert plans[0] - plans[1] == 2 * 4 * mlp


def test_checkpoint_on_the_hub_is_planned_by_its_headers(tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    planned = skeleton(settings_of(quantized)).weight_bytes()
    names = {dtype: name for name, dtype in TYPES.items()}
    told = {
        name: SimpleNamespace(dtype=names[tensor.dtype], shape=[*tensor.shape])
        for name, tensor in load_file(quantized / "model.safetensors").items()
    }
    (quantized / "model.safetensors").unlink()
    metadata = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=told)})
    with (
        patch.object(stored, "get_safetensors_metadata", lambda name: metadata),
        patch.object(Path, "is_dir", lambda path: False),
    ):
        assert skeleton(settings_of(quantized)).weight_bytes() == planned
