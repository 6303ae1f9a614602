"""Checkpoints that are quantized already: what they say, what they take, and what they need."""

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.decoding.settings import Sampling
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading import quantized_checkpoint
from outrider.engine.loading.quantized_checkpoint import (
    REQUIREMENTS,
    QuantizedCheckpoint,
    Requirement,
    keeps_mxfp4,
)
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import (
    FORMATS,
    METHODS,
    MXFP4,
    fp8_on_cpu,
    params_of,
    quantize,
    quantize_experts,
)

REQUESTS = [
    OfflineRequest(prompt, Sampling(max_tokens=16, temperature=heat), 7)
    for prompt, heat in (((5, 9, 33, 17), 0.0), ((8, 21), 0.9))
]
ROOT = Path(__file__).parents[3]
KEPT = ("fp8", "fp8, one scale", "compressed fp8", "compressed fp8, one scale")


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"dtype": "float32", "device": "cpu", "threads": 1, "cache_memory": 2**20}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def texts(folder: Path) -> list[tuple[int, ...]]:
    engine = Engine.from_settings(settings_of(folder))
    return [output.tokens for output in generate(engine, None, REQUESTS, 0)]


def has_gptqmodel() -> bool:
    return importlib.util.find_spec("gptqmodel") is not None


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", params_of(*KEPT, "compressed int4"))
def test_on_a_cpu_it_says_what_its_weights_stand_for(tmp_path: Path, name: str, kind: str) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", kind), name, tmp_path)
    assert texts(quantized) == texts(meant)
    loaded = load_model(settings_of(quantized))
    assert allocated_weights(loaded) == skeleton(settings_of(quantized)).weight_bytes(on_cuda=False)


@pytest.mark.skipif(not has_gptqmodel(), reason="gptqmodel is not installed: pip install 'outrider[gptq]'")
@pytest.mark.filterwarnings("default")  # gptqmodel warns about what it uses itself
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_model_of_gptqmodel_says_what_its_weights_stand_for(tmp_path: Path, name: str) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    ids = torch.tensor([REQUESTS[0].prompt])
    with torch.inference_mode():
        logits = load_model(settings_of(quantized))(ids).logits
        expected = AutoModelForCausalLM.from_pretrained(meant)(ids).logits
    assert (logits - expected).norm() < 0.02 * expected.norm()  # its scales have 16 bits
    assert [len(text) for text in texts(quantized)] == [16, 16]


@pytest.mark.parametrize("name", params_of(*KEPT))
def test_gpu_keeps_fp8_as_it_is_stored(tmp_path: Path, name: str) -> None:
    """Pretends that the CPU multiplies fp8: on a GPU only the kernel differs."""
    plain = write_checkpoint(tmp_path / "plain", "llama", hidden_size=128)
    quantized, meant = quantize(plain, name, tmp_path)
    ids = torch.tensor([REQUESTS[0].prompt])
    with fp8_on_cpu(), torch.inference_mode():
        model = load_model(settings_of(quantized))
        assert not model._forward_pre_hooks  # nothing is unpacked with the first pass
        logits = model(ids).logits
        planned = skeleton(settings_of(quantized)).weight_bytes()
    weights = dict(model.named_parameters())
    for key, stored in load_file(quantized / "model.safetensors").items():
        if stored.dtype == torch.float8_e4m3fn:
            assert weights[key].dtype == stored.dtype
            assert torch.equal(weights[key].float(), stored.float())
    expected = AutoModelForCausalLM.from_pretrained(meant)(ids).logits
    assert (logits - expected).norm() < 0.2 * expected.norm()  # rows are rounded to FP8 too, but for blocks
    assert allocated_weights(model) == planned


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"format": "pack-quantized"}, False),
        ({"config_groups": {"group_0": {"input_activations": None}}}, False),  # inputs are not to be rounded
        ({"config_groups": {"group_0": {"weights": {"strategy": "block"}}}}, False),
        ({"ignore": []}, False),  # the output projection is quantized too
        ({"config_groups": {"group_1": {"targets": ["re:.*mlp.*"]}}}, False),
    ],
)
def test_compressed_tensors_in_fp8_are_kept_where_torch_has_the_product(
    tmp_path: Path, change: dict[str, Any], kept: bool
) -> None:
    """Told from the config, without the library."""
    folder = write_checkpoint(tmp_path, "llama")
    _write_said(folder, _merged(FORMATS["compressed fp8"][1], change))
    model = skeleton(settings_of(folder))
    assert (model.weight_bytes() < 0.5 * model.weight_bytes(on_cuda=False)) == kept


def test_layers_that_are_ignored_are_planned_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    said = FORMATS["compressed fp8"][1]
    planned = []
    for ignored in ([], ["re:.*down_proj"], ["model.layers.0.mlp.up_proj"]):
        _write_said(folder, {**said, "ignore": ["lm_head", *ignored]})
        planned.append(skeleton(settings_of(folder)).weight_bytes())
    more = 64 * 128 * 3  # bytes of a weight in float32, but for the one that it takes in FP8
    assert planned[1] - planned[0] == 3 * (more - 4 * 64)
    assert planned[2] - planned[0] == more - 4 * 128


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_weights_that_a_library_keeps_take_what_their_files_hold(tmp_path: Path, name: str) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    size = (quantized / "model.safetensors").stat().st_size
    assert skeleton(settings_of(quantized)).weight_bytes() == size


@pytest.mark.parametrize("name", FORMATS)
def test_missing_library_is_named_with_what_installs_it(tmp_path: Path, name: str) -> None:
    method = METHODS[name]
    extra, libraries = REQUIREMENTS[method].extra, REQUIREMENTS[method].libraries
    nothing = Requirement(extra, dict.fromkeys(libraries, lambda: False))
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    with (
        fp8_on_cpu(),
        patch.dict(REQUIREMENTS, {method: nothing}),
        pytest.raises(UnsupportedModelError) as refusal,
    ):
        Engine.from_settings(settings_of(quantized))
    message = str(refusal.value)
    assert f"model={str(quantized)!r}: quant_method={method!r} needs {' and '.join(libraries)}" in message
    assert message.endswith(f"pip install 'outrider[{extra}]'")


@pytest.mark.parametrize("method", REQUIREMENTS)
def test_every_extra_brings_what_is_asked_for(method: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirement = REQUIREMENTS[method]
    names = [line.split(">")[0] for line in extras[requirement.extra]]
    brought = {name.removeprefix("transformers[").removesuffix("]") for name in names}
    assert brought == set(requirement.libraries)


def test_fp8_needs_no_library_where_it_is_dequantized(tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    nothing = Requirement("fp8", {"kernels": lambda: False})
    with patch.dict(REQUIREMENTS, fp8=nothing):
        assert load_model(settings_of(quantized)).dtype == torch.float32


def test_weights_of_parts_of_blocks_are_not_dequantized(tmp_path: Path) -> None:
    """transformers would take 24 outputs with two scales for two blocks of 12."""
    folder = write_checkpoint(tmp_path, "llama", intermediate_size=24)
    _write_said(folder, FORMATS["fp8"][1])
    named = r"weight_block_size=\[16, 16\] .*mlp\.gate_proj\.weight of 24 outputs .* capability 8\.9"
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(settings_of(folder))


def test_mxfp4_is_planned_as_large_as_it_becomes(tmp_path: Path) -> None:
    """MXFP4 is dequantized on a CPU; a GPU keeps it as its files hold it, if kernels are there."""
    plain = write_checkpoint(tmp_path / "plain", "gpt_oss")
    quantized, meant = quantize_experts(plain, tmp_path)
    assert texts(quantized) == texts(meant)
    loaded = load_model(settings_of(quantized))
    assert allocated_weights(loaded) == skeleton(settings_of(quantized)).weight_bytes(on_cuda=False)
    on_gpu = settings_of(quantized, device="cuda")
    dequantized = skeleton(on_gpu).weight_bytes()
    with patch.object(quantized_checkpoint, "keeps_mxfp4", lambda device: device.type == "cuda"):
        kept = skeleton(on_gpu).weight_bytes()
    assert kept == (quantized / "model.safetensors").stat().st_size
    assert dequantized > 2 * kept


def test_library_that_would_keep_mxfp4_on_a_gpu_is_named() -> None:
    checkpoint = QuantizedCheckpoint(AutoConfig.for_model("gpt_oss", quantization_config=MXFP4), "a model")
    assert checkpoint.lacks(torch.device("cpu")) is None
    with patch.object(quantized_checkpoint, "keeps_mxfp4", lambda device: False):
        assert "pip install 'outrider[mxfp4]'" in str(checkpoint.lacks(torch.device("cuda")))
    with patch.object(quantized_checkpoint, "keeps_mxfp4", lambda device: True):
        assert checkpoint.lacks(torch.device("cuda")) is None


def test_mxfp4_is_kept_where_kernels_are_installed_and_triton_is_new_enough() -> None:
    found = Requirement("mxfp4", {"kernels": lambda: True})
    with patch.dict(REQUIREMENTS, mxfp4=found):
        for version in (True, False):
            with patch.object(
                quantized_checkpoint, "is_triton_available", lambda least, version=version: version
            ):
                assert keeps_mxfp4(torch.device("cuda")) == version
                assert not keeps_mxfp4(torch.device("cpu"))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_kernels_that_an_offline_worker_cannot_fetch_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    source = REQUIREMENTS[method].kernels
    assert source is not None
    monkeypatch.setitem(REQUIREMENTS, method, Requirement(method, {}, source))
    monkeypatch.setattr(quantized_checkpoint, "keeps_mxfp4", lambda device: True)
    monkeypatch.setattr(quantized_checkpoint, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = AutoConfig.for_model("gpt_oss", quantization_config={"quant_method": method})
    checkpoint = QuantizedCheckpoint(config, "a model")
    with pytest.raises(UnsupportedModelError, match=f"{source} from the hub, HF_HUB_OFFLINE is set"):
        checkpoint.check_libraries(torch.device("cuda"))
    (tmp_path / f"models--{source.replace('/', '--')}").mkdir()
    checkpoint.check_libraries(torch.device("cuda"))


def _merged(said: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Returns a config whose changed keys lie at any depth."""
    return {
        **said,
        **{
            key: _merged(said[key], value) if isinstance(value, dict) and key in said else value
            for key, value in change.items()
        },
    }


def _write_said(folder: Path, said: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
