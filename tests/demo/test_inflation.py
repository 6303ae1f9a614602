"""An inflated checkpoint costs more and computes the same function."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from outrider.demo.inflation import InflationError, inflate

OLD = {"hidden": 32, "layers": 3, "intermediate": 48, "heads": 4, "kv_heads": 2}
LARGER: dict[str, Any] = {"hidden": 96, "layers": 7, "intermediate": 80, "heads": 8, "kv_heads": 4}


def llama_config(**changes: object) -> LlamaConfig:
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": OLD["hidden"],
        "num_hidden_layers": OLD["layers"],
        "intermediate_size": OLD["intermediate"],
        "num_attention_heads": OLD["heads"],
        "num_key_value_heads": OLD["kv_heads"],
        "tie_word_embeddings": True,
        # Large enough that an eps left as it was would show.
        "rms_norm_eps": 1e-2,
    }
    return LlamaConfig(**{**fields, **changes})


def random_llama(folder: Path, **changes: object) -> Path:
    torch.manual_seed(7)
    model = LlamaForCausalLM(llama_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    token_ids = torch.arange(24).view(2, 12) * 5 % 64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(token_ids).logits


def assert_same_function(source: Path, inflated: Path) -> None:
    before, after = logits(source), logits(inflated)
    assert before.std() > 0.1
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"hidden": 96}, id="hidden"),
        pytest.param({"layers": 8}, id="layers"),
        pytest.param({"intermediate": 100}, id="intermediate"),
        pytest.param({"heads": 8, "kv_heads": 4}, id="more heads, as many to a kv head"),
        pytest.param({"heads": 8}, id="more heads to a kv head"),
        pytest.param({"heads": 8, "kv_heads": 8}, id="fewer heads to a kv head"),
        pytest.param(LARGER, id="everything"),
        pytest.param({}, id="nothing"),
    ],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_inflate_keeps_every_logit(tmp_path: Path, sizes: dict[str, Any], tied: bool) -> None:
    source = random_llama(tmp_path / "source", tie_word_embeddings=tied)
    inflate(source, tmp_path / "inflated", **sizes)
    assert_same_function(source, tmp_path / "inflated")


def test_groups_that_do_not_divide_each_other(tmp_path: Path) -> None:
    source = random_llama(
        tmp_path / "source", hidden_size=36, num_attention_heads=6, head_dim=8
    )  # groups of 3
    inflate(source, tmp_path / "inflated", hidden=48, heads=8, kv_heads=4)  # groups of 2
    assert_same_function(source, tmp_path / "inflated")


def test_inflate_keeps_a_head_size_that_is_not_hidden_over_heads(tmp_path: Path) -> None:
    source = random_llama(tmp_path / "source", head_dim=16)
    inflate(source, tmp_path / "inflated", **LARGER)
    assert_same_function(source, tmp_path / "inflated")
    assert LlamaConfig.from_pretrained(tmp_path / "inflated").head_dim == 16


def test_inflate_makes_an_ordinary_llama_of_the_requested_size(tmp_path: Path) -> None:
    source = random_llama(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    parameters = inflate(source, tmp_path / "inflated", **LARGER)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "inflated")
    assert type(model) is LlamaForCausalLM
    assert model.config.hidden_size == 96
    assert model.config.num_hidden_layers == 7
    assert model.config.intermediate_size == 80
    assert model.config.num_attention_heads == 8
    assert model.config.num_key_value_heads == 4
    assert model.num_parameters() == parameters
    assert (tmp_path / "inflated" / "tokenizer.json").read_text() == "{}"


def test_weights_that_change_nothing_are_neither_zero_nor_denormal(tmp_path: Path) -> None:
    inflate(random_llama(tmp_path / "source"), tmp_path / "inflated", **LARGER)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "inflated")
    for name, parameter in model.named_parameters():
        if not name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            assert parameter.abs().min() > torch.finfo(torch.float32).tiny, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inflate_with_a_dtype_stores_that_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    inflate(random_llama(tmp_path / "source"), tmp_path / "inflated", dtype, **LARGER)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "inflated", dtype="auto").dtype == dtype


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 16}, "hidden is 16; it must be at least the source's 32"),
        ({"layers": 2}, "layers is 2; it must be at least the source's 3"),
        ({"intermediate": 47}, "intermediate is 47; it must be at least the source's 48"),
        ({"heads": 6, "kv_heads": 4}, "heads is 6; it must be a multiple of kv_heads, 4"),
        ({"hidden": 33}, "hidden is 33; Llama accepts a multiple of heads, 4"),
    ],
)
def test_inflate_with_an_impossible_size_is_refused_by_name(
    tmp_path: Path, sizes: dict[str, Any], message: str
) -> None:
    source = random_llama(tmp_path / "source")
    with pytest.raises(InflationError, match=message):
        inflate(source, tmp_path / "inflated", **sizes)
    assert not (tmp_path / "inflated").exists()


def test_too_few_kv_heads_for_smaller_groups_are_refused(tmp_path: Path) -> None:
    source = random_llama(tmp_path / "source", num_attention_heads=8, num_key_value_heads=2)  # groups of 4
    with pytest.raises(InflationError, match=r"kv_heads is 3; .* it must be at least 4"):
        inflate(source, tmp_path / "inflated", hidden=72, heads=9, kv_heads=3)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_inflate_of_a_llama_with_biases_is_refused_by_name(tmp_path: Path, field: str) -> None:
    source = random_llama(tmp_path / "source", **{field: True})
    with pytest.raises(InflationError, match=field):
        inflate(source, tmp_path / "inflated")


def test_inflate_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=48, num_attention_heads=4
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "source")
    with pytest.raises(InflationError, match="model_type is 'qwen2'; only 'llama' can be inflated"):
        inflate(tmp_path / "source", tmp_path / "inflated")


def test_inflate_leaves_an_existing_destination_alone(tmp_path: Path) -> None:
    source = random_llama(tmp_path / "source")
    with pytest.raises(FileExistsError):
        inflate(source, source)
