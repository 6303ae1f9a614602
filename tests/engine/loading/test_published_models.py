"""What is planned for models as they are published, against the shapes of their tensors, without weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from outrider.engine.loading.shares import check_shares
from outrider.engine.loading.weights import attach
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.skeleton import ModelSkeleton, skeleton
from outrider.engine.settings import EngineSettings
from tests.support.sharded import bytes_of, group_of, sharded

# https://huggingface.co/meta-llama/Llama-3.3-70B-Instruct/blob/main/config.json
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def settings_of(folder: Path, config: dict[str, Any], ranks: int = 1) -> EngineSettings:
    (folder / "config.json").write_text(json.dumps(config))
    return EngineSettings.model_validate({"model": str(folder), "device": "cuda", "tensor_parallel": ranks})


def cache_bytes_per_token(model: ModelSkeleton, settings: EngineSettings) -> int:
    return (
        block_bytes(settings, model.layers_of(settings.tensor_parallel), model.dtype) // settings.block_size
    )


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_70b_is_planned_as_its_tensors_are_shared(tmp_path: Path, ranks: int) -> None:
    settings = settings_of(tmp_path, LLAMA_70B, ranks)
    check_shares(settings)
    model = skeleton(settings)
    assert model.parameters == 70_553_706_496
    assert model.context_length == 131_072
    heads = max(8 // ranks, 1)  # with 16 ranks two hold the same
    assert {*model.layers_of(ranks).values()} == {(heads, 128, 128)}
    assert cache_bytes_per_token(model, settings) == 2 * 80 * heads * 128 * 2
    if ranks == 1:
        assert model.weight_bytes() == pytest.approx(2 * model.parameters, rel=1e-6)
        return
    with group_of(ranks):
        found = sharded(AutoConfig.from_pretrained(tmp_path), ranks)
        assert attach(found, "70B").shapes == model.layers_of(ranks)
    assert model.weight_bytes(ranks) == pytest.approx(bytes_of(found), rel=1e-5)


def test_gpt_oss_120b_is_planned_as_large_as_it_becomes(tmp_path: Path) -> None:
    """Plans bfloat16, and MXFP4 without what would keep it in 4 bit."""
    for quantized in ({}, {"quantization_config": MXFP4}):
        settings = settings_of(tmp_path, {**GPT_OSS_120B, **quantized})
        model = skeleton(settings)
        assert model.parameters == 116_829_156_672
        assert model.weight_bytes() == pytest.approx(2 * model.parameters, rel=1e-4)
        assert {*model.layers_of(1).values()} == {(8, 64, 64)}
        assert cache_bytes_per_token(model, settings) == 2 * 36 * 8 * 64 * 2


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("device", "dtype", "shape"),
    [
        ("cuda", "bfloat16", (1, 512 + 64, 0)),
        ("cpu", "bfloat16", (1, 512 + 64, 0)),
        ("cuda", "float16", (128, 128 + 64, 128)),
    ],
)
def test_deepseek_v3_is_planned_with_a_cache_of_latents_but_in_float16(
    tmp_path: Path, device: str, dtype: str, shape: tuple[int, int, int]
) -> None:
    """transformers has the shape of DeepSeek-V3 as its defaults."""
    settings = settings_of(tmp_path, {"model_type": "deepseek_v3", "torch_dtype": dtype})
    settings = settings.model_copy(update={"device": device})
    model = skeleton(settings)
    assert {*model.layers_of(1).values()} == {shape}
    heads, key_dim, value_dim = shape
    assert cache_bytes_per_token(model, settings) == 2 * 61 * heads * (key_dim + value_dim)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gpt_oss_120b_is_shared_by_a_plan_of_ours(tmp_path: Path, ranks: int) -> None:
    settings = settings_of(tmp_path, GPT_OSS_120B, ranks)
    check_shares(settings)
    model = skeleton(settings)
    assert model.weight_bytes(ranks) == pytest.approx(2 * model.parameters / ranks, rel=0.01)
    assert {*model.layers_of(ranks).values()} == {(8 // ranks, 64, 64)}
