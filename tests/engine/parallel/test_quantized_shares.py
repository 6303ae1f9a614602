"""Ranks share a checkpoint that is quantized already: what each holds, what they say, what is refused."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from outrider.decoding.settings import Sampling
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.shares import check_shares
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import ARCHITECTURES, COMMON, write_checkpoint
from tests.support.quantized_checkpoints import FORMATS, FP8, fp8_on_cpu, params_of, quantize
from tests.support.ranks import Ranks

PROMPT = (5, 9, 33, 17, 60, 2, 8)
REQUESTS = [OfflineRequest(PROMPT[:length], Sampling(max_tokens=12), length) for length in (7, 3)]


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"dtype": "float32", "device": "cpu", "threads": 1, "cache_memory": 2**20}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def texts(engine: Engine) -> list[tuple[int, ...]]:
    return [output.tokens for output in generate(engine, None, REQUESTS, 0)]


def say(group: RankGroup, settings: EngineSettings, in_fp8: bool) -> list[tuple[int, ...]]:
    with fp8_on_cpu() if in_fp8 else nullcontext():
        engine = Engine.from_settings(settings, group)
        said = texts(engine)
    engine.shut_down()
    return said


def follow_on(group: RankGroup, settings: EngineSettings, in_fp8: bool) -> None:
    with fp8_on_cpu() if in_fp8 else nullcontext():
        follow(load_forward_pass(settings, group), group)


@pytest.mark.parametrize(
    ("kind", "in_fp8"),
    [pytest.param("llama", False, marks=pytest.mark.slow), ("llama", True), ("qwen3_moe", False)],
    ids=["dequantized", "in FP8", "dequantized experts"],
)
def test_two_processes_say_what_one_says_of_fp8_in_blocks(
    ranks: Ranks, tmp_path: Path, kind: str, in_fp8: bool
) -> None:
    quantized, meant = quantize(write_checkpoint(tmp_path / "plain", kind), "fp8", tmp_path)
    [said, _] = ranks.run(say, follow_on, settings_of(quantized, tensor_parallel=2), in_fp8)
    assert said == texts(Engine.from_settings(settings_of(meant)))


@dataclass(frozen=True)
class Loaded:
    weights: dict[str, Tensor]  # and scales
    size: int  # bytes
    logits: Tensor  # none, if it was not to compute any


def load(group: RankGroup | None, settings: EngineSettings, computes: bool) -> Loaded:
    with fp8_on_cpu(), torch.inference_mode():
        model = load_model(settings)
        logits = model(torch.tensor([PROMPT])).logits if computes else torch.empty(0)
    # Of layers that add up their products weights lie one deeper: "o_proj.linear.weight".
    weights = {name.replace(".linear.", "."): local(weight) for name, weight in model.named_parameters()}
    return Loaded(weights, allocated_weights(model), logits)


def local(weight: Tensor) -> Tensor:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()


def adds_up(name: str) -> bool:
    """Whether ranks have inputs of this weight, not outputs."""
    return name.split(".")[-2] in ("o_proj", "down_proj")


def share_of(name: str, stored: dict[str, Tensor], rank: int) -> Tensor:
    """What this rank has to have of a weight in FP8, or of its scales."""
    weight = stored[name]
    if not weight.ndim:
        return weight
    if not name.endswith("weight_scale"):
        return weight.chunk(2, -1 if adds_up(name) else -2)[rank]
    scales = weight.expand(len(stored[name.removesuffix("_scale")]), 1)
    return (scales if adds_up(name) else scales.chunk(2)[rank]).T


@pytest.mark.parametrize(
    "name", params_of("fp8", "fp8, one scale", "compressed fp8", "compressed fp8, one scale")
)
def test_each_rank_keeps_its_share_in_fp8(ranks: Ranks, tmp_path: Path, name: str) -> None:
    plain = write_checkpoint(tmp_path / "plain", "llama", hidden_size=256, intermediate_size=512)
    quantized, _ = quantize(plain, name, tmp_path)
    settings = settings_of(quantized)
    shared = settings.model_copy(update={"tensor_parallel": 2})
    with fp8_on_cpu():
        planned = skeleton(shared).weight_bytes(2)
    stored = load_file(quantized / "model.safetensors")
    in_fp8 = [key for key in stored if stored[key].dtype == FP8 or "scale" in key]
    assert len(in_fp8) == 2 * 7 * 3  # weights and scales of seven products a layer
    loaded = ranks.run(load, load, shared, True)
    for rank, of_rank in enumerate(loaded):
        for key in in_fp8:
            assert torch.equal(of_rank.weights[key].float(), share_of(key, stored, rank).float()), key
        assert of_rank.size == pytest.approx(planned, rel=0.01)
    alone = load(None, settings, True)
    # Of scales for outputs, parts of rows are rounded to FP8 now, each by a scale of its own.
    most = 1e-4 if name.startswith("fp8") else 0.2
    assert (loaded[0].logits - alone.logits).norm() < most * alone.logits.norm()


def test_each_rank_keeps_its_share_of_experts_in_fp8(ranks: Ranks, tmp_path: Path) -> None:
    quantized, _ = quantize(write_checkpoint(tmp_path / "plain", "qwen3_moe"), "fp8", tmp_path)
    stored = load_file(quantized / "model.safetensors")
    shared = settings_of(quantized, tensor_parallel=2)
    for rank, of_rank in enumerate(ranks.run(load, load, shared, False)):
        for of_file, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):

            def part(projection: str, expert: int, of_file: str = of_file, rank: int = rank) -> Tensor:
                key = f"model.layers.1.mlp.experts.{expert}.{projection}.{of_file}"
                return share_of(key, stored, rank).float()

            gate_up = of_rank.weights[f"model.layers.1.mlp.experts.gate_up_proj{suffix}"]
            down = of_rank.weights[f"model.layers.1.mlp.experts.down_proj{suffix}"]
            for expert in range(4):
                both = torch.cat([part("gate_proj", expert), part("up_proj", expert)])
                assert torch.equal(gate_up[expert].float(), both)
                assert torch.equal(down[expert].float(), part("down_proj", expert))


def said_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**FORMATS[name][1], **changes}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "awq": (said_of("awq"), {}, r"quant_method='awq'.*give 1, or a checkpoint with quant_method='fp8'"),
    "gptq": (said_of("gptq"), {}, "quant_method='gptq'.*give 1"),
    "bitsandbytes": ({"load_in_4bit": True}, {}, "quant_method='bitsandbytes'.*give 1"),
    "int4": (said_of("compressed int4"), {}, "quant_method='compressed-tensors'.*weights and inputs.*in FP8"),
    "part of a block of inputs": (
        said_of("fp8", weight_block_size=[16, 64]),
        {},
        r"weight_block_size=\[16, 64\].*layers.0.self_attn.o_proj.weight would be 32 inputs.*give 1$",
    ),
    "part of a block of outputs": (
        said_of("fp8", weight_block_size=[64, 16]),
        {},
        r"weight_block_size=\[64, 16\].*self_attn.q_proj.weight would be 32 outputs.*give 1$",
    ),
    "too narrow for the product": (
        said_of("compressed fp8"),
        {"intermediate_size": 144},
        "blocks of 16.*mlp.gate_proj.weight would be 72 outputs.*give 1$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shares_that_cannot_be_are_refused_by_name(tmp_path: Path, case: str) -> None:
    """The config alone decides: there are no weights to load, and no group to load them into."""
    said, fields, named = REFUSED[case]
    write_config(tmp_path, "llama", said, **fields)
    with pytest.raises(UnsupportedModelError, match=f"tensor_parallel=2: model=.*{named}"):
        check_shares(settings_of(tmp_path, tensor_parallel=2))


def test_refusal_says_which_numbers_of_ranks_would_do(tmp_path: Path) -> None:
    fields = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_size": 128,
        "intermediate_size": 192,
    }
    write_config(tmp_path, "llama", said_of("fp8"), **fields)
    check_shares(settings_of(tmp_path, tensor_parallel=4))
    with pytest.raises(UnsupportedModelError, match=r"24 outputs, which are no whole blocks; give 1 or 2 or"):
        check_shares(settings_of(tmp_path, tensor_parallel=8))


def test_experts_are_shared_in_whole_blocks_too(tmp_path: Path) -> None:
    """Gate and up projections lie in one tensor, each of which is split."""
    write_config(tmp_path, "qwen3_moe", said_of("fp8"), moe_intermediate_size=48)
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts\.gate_up_proj would be 24 outputs"):
        check_shares(settings_of(tmp_path, tensor_parallel=2))


@pytest.mark.parametrize("name", params_of("fp8, one scale", "compressed fp8"))
def test_without_fp8_on_the_device_scales_of_outputs_are_refused(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, "llama", said_of(name))
    with pytest.raises(
        UnsupportedModelError, match=r"tensor_parallel=2 .*give 1, or GPUs of .*capability 8\.9"
    ):
        load_model(settings_of(tmp_path, tensor_parallel=2))


def write_config(folder: Path, kind: str, said: dict[str, Any], **fields: Any) -> None:
    config = AutoConfig.for_model(kind, **{**COMMON, **ARCHITECTURES[kind], **fields})
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": said}))
