"""Latent attention multiplies queries by the expansion, and so says what expanded keys and values say."""

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from outrider.engine.forward.latent import LatentProjection, use_latents
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import quantize

OURS, TOKENS, HEADS, LATENT, ROTATED, KEY, VALUE = "ours", 5, 4, 32, 8, 16, 24


def attention_of() -> DeepseekV3Attention:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=KEY,
        v_head_dim=VALUE,
    )
    return DeepseekV3Attention(config, 0).eval()


@torch.inference_mode()
def test_scores_and_values_of_latents_are_those_of_expanded_keys_and_values() -> None:
    attention = attention_of()
    latents, rotated = torch.randn(1, 1, TOKENS, LATENT), torch.randn(1, 1, TOKENS, ROTATED)
    query, weights = torch.randn(HEADS, 3, KEY + ROTATED), torch.rand(HEADS, 3, TOKENS)
    keys, values = (expanded[0] for expanded in attention.expand_kv(latents, rotated))
    use_latents(attention, OURS)
    attention.config._attn_implementation = OURS
    (cached, nothing), projection = attention.expand_kv(latents, rotated), attention.kv_b_proj
    assert isinstance(projection, LatentProjection)
    assert nothing.shape == (1, 1, TOKENS, 0)
    scores = projection.absorbed(query) @ cached[0].transpose(1, 2)
    torch.testing.assert_close(scores, query @ keys.transpose(1, 2), atol=1e-5, rtol=1e-5)
    gathered = (weights @ cached[0, ..., : projection.latent_dim]).transpose(0, 1)
    expected = (weights @ values).transpose(0, 1)
    torch.testing.assert_close(projection.expanded(gathered), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_latents_under_another_attention_are_expanded_as_before() -> None:
    attention = attention_of()
    latents, rotated = torch.randn(1, 1, TOKENS, LATENT), torch.randn(1, 1, TOKENS, ROTATED)
    expected = attention.expand_kv(latents, rotated)
    use_latents(attention, OURS)
    attention.config._attn_implementation = "eager"
    for ours, theirs in zip(attention.expand_kv(latents, rotated), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("cache_dtype", ["auto", "float8_e4m3fn"])
def test_cache_of_latents_takes_what_was_planned(tmp_path: Path, cache_dtype: str) -> None:
    folder = write_checkpoint(tmp_path, "deepseek_v3")
    fields = {"model": str(folder), "cache_dtype": cache_dtype, "cache_memory": 2**20, "device": "cpu"}
    settings = EngineSettings.model_validate(fields)
    engine = Engine.from_settings(settings)
    assert {keys.shape[1:] for keys in engine._cache.keys.values()} == {(1, 32 + 32)}
    assert allocated_cache(engine._cache) == plan_memory(skeleton(settings), settings, 2**30).cache


def test_projection_that_is_stored_quantized_is_widened_once(tmp_path: Path) -> None:
    quantized, meant = quantize(
        write_checkpoint(tmp_path / "plain", "deepseek_v3"), "compressed fp8", tmp_path
    )
    name = "model.layers.1.self_attn.kv_b_proj"
    found, expected = (
        load_model(EngineSettings(model=str(folder), dtype="float32", device="cpu")).get_submodule(name)
        for folder in (quantized, meant)
    )
    assert isinstance(found, LatentProjection)
    torch.testing.assert_close(found.weight, expected.weight)
