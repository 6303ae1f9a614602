"""Ranks share a checkpoint that is quantized already: what each holds, what they say, what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decoding.settings import Sampling
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.linear import StoredLinear
from outrider.engine.loading.shares import check_shares
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import FORMATS, quantize, quantize_experts
from tests.support.ranks import Ranks, follow_to_the_end

PROMPT = (5, 9, 33, 17, 60, 2, 8)
REQUESTS = [OfflineRequest(PROMPT[:length], Sampling(max_tokens=12), length) for length in (7, 3)]
ADDING_UP = ("o_proj", "down_proj")  # layers of which a rank has some inputs


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"dtype": "float32", "device": "cpu", "threads": 1, "cache_memory": 2**20}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def texts(engine: Engine) -> list[tuple[int, ...]]:
    return [output.tokens for output in generate(engine, None, REQUESTS, 0)]


def say(group: RankGroup, settings: EngineSettings) -> list[tuple[int, ...]]:
    engine = Engine.from_settings(settings, group)
    said = texts(engine)
    engine.shut_down()
    return said


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "fp8"),
        ("qwen3_moe", "compressed int4, zeros"),
        pytest.param("qwen3_moe", "fp8", marks=pytest.mark.slow),
        pytest.param("qwen2", "compressed int4, zeros", marks=pytest.mark.slow),
        pytest.param("llama", "modelopt nvfp4", marks=pytest.mark.slow),
        pytest.param("llama", "awq", marks=pytest.mark.slow),
        pytest.param("qwen3", "compressed int8", marks=pytest.mark.slow),
        ("qwen3_5_text", "fp8"),
        pytest.param("qwen3_next", "fp8", marks=pytest.mark.slow),
        pytest.param("minimax_m2", "fp8", marks=pytest.mark.slow),
    ],
)
def test_two_processes_say_what_one_says_of_the_weights_meant(
    ranks: Ranks, tmp_path: Path, kind: str, name: str
) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", kind), name, tmp_path)
    [said, _] = ranks.run(say, follow_to_the_end, settings_of(quantized, tensor_parallel=2))
    assert said == texts(Engine.from_settings(settings_of(meant)))


def test_two_processes_with_unequal_shares_of_experts_in_mxfp4_say_what_one_says(
    ranks: Ranks, tmp_path: Path
) -> None:
    plain = write_checkpoint(tmp_path / "plain", "gpt_oss", intermediate_size=96)
    quantized, meant = quantize_experts(plain, tmp_path)
    [said, _] = ranks.run(say, follow_to_the_end, settings_of(quantized, tensor_parallel=2))
    assert said == texts(Engine.from_settings(settings_of(meant)))


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("name", ["fp8", "compressed int4, zeros"])
def test_four_processes_with_two_heads_of_keys_say_what_one_says(
    four_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", "qwen2"), name, tmp_path)
    [said, *_] = four_ranks.run(say, follow_to_the_end, settings_of(quantized, tensor_parallel=4))
    assert said == texts(Engine.from_settings(settings_of(meant)))


@dataclass(frozen=True)
class Loaded:
    numbers: dict[str, Tensor]  # numbers of stored layers
    size: int  # bytes


def load(group: RankGroup | None, settings: EngineSettings) -> Loaded:
    model = load_model(settings)
    numbers = {
        name.removesuffix(".linear"): module.weight.widened()  # layers that add up lie one deeper
        for name, module in model.named_modules()
        if isinstance(module, StoredLinear)
    }
    return Loaded(numbers, allocated_weights(model))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", FORMATS)
def test_each_rank_keeps_its_share_as_it_is_stored(ranks: Ranks, tmp_path: Path, name: str) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), name, tmp_path)
    whole = load(None, settings_of(quantized)).numbers
    assert len(whole) == 3 * 7
    shared = settings_of(quantized, tensor_parallel=2)
    planned = skeleton(shared).weight_bytes(2)
    for rank, of_rank in enumerate(ranks.run(load, load, shared)):
        for layer, numbers in whole.items():
            parts = numbers.chunk(2, int(layer.endswith(ADDING_UP)))
            assert torch.equal(of_rank.numbers[layer], parts[rank]), layer
        assert of_rank.size == pytest.approx(planned, rel=0.01)


def test_each_of_four_ranks_keeps_one_of_two_heads_of_keys(four_ranks: Ranks, tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    whole = load(None, settings_of(quantized)).numbers
    shared = settings_of(quantized, tensor_parallel=4)
    planned = skeleton(shared).weight_bytes(4)
    for rank, of_rank in enumerate(four_ranks.run(load, load, shared)):
        for name in ("k_proj", "v_proj"):
            layer = f"model.layers.0.self_attn.{name}"
            assert torch.equal(of_rank.numbers[layer], whole[layer].chunk(2)[rank // 2])
        assert of_rank.size == pytest.approx(planned, rel=0.01)


def test_ranks_that_cannot_share_a_layer_evenly_are_refused_by_its_name(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "llama", intermediate_size=160, num_key_value_heads=4)
    quantized, _ = quantize(plain, "compressed fp8", tmp_path)
    check_shares(settings_of(quantized, tensor_parallel=4))
    plain = write_checkpoint(tmp_path / "odd", "llama", intermediate_size=162, num_key_value_heads=4)
    quantized, _ = quantize(plain, "compressed fp8", tmp_path / "other")
    named = r"tensor_parallel=4: model=.* has 162 outputs of model\.layers\.0\.mlp\.gate_proj in e4m3"
    with pytest.raises(UnsupportedModelError, match=named):
        check_shares(settings_of(quantized, tensor_parallel=4))


def test_layers_whose_outputs_are_gathered_are_refused_by_their_style(tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "phi3"), "compressed fp8", tmp_path)
    named = "shares model.layers.0.self_attn.qkv_proj by transformers' colwise_gather_output, .* give 1"
    with pytest.raises(UnsupportedModelError, match=named):
        check_shares(settings_of(quantized, tensor_parallel=2))
