"""What a step reads, computes and launches, told from a config."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from outrider.engine.forward.graphs import CAPTURED_SIZES
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.planning.accelerators import ACCELERATORS, ARITHMETIC, MEMORY
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.planning.step_costs import (
    HOST,
    KERNEL_S,
    LAUNCH_S,
    NO_HOST,
    SLOTS_S,
    StepCosts,
    step_costs,
)
from outrider.engine.settings import EngineSettings, Quantization
from outrider.pace.step import StepSize

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 64, 160, 3, 500
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # heads of 16 dimensions
PRODUCTS = LAYERS * (HIDDEN * HIDDEN * 2 + HIDDEN * 32 * 2 + 3 * HIDDEN * INTERMEDIATE) + HIDDEN * VOCAB
NORMS = (2 * LAYERS + 1) * HIDDEN


H100, L4 = ACCELERATORS["H100"], ACCELERATORS["L4"]


def costs(
    layers: int = LAYERS,
    devices: int = 1,
    tied: bool = False,
    quantization: Quantization | None = None,
) -> StepCosts:
    config = LlamaConfig(**SHAPE, **HEADS, num_hidden_layers=layers, tie_word_embeddings=tied)
    model = ModelSkeleton(config, "m", torch.bfloat16)
    return step_costs(model, EngineSettings(model="m", tensor_parallel=devices, quantization=quantization))


@pytest.mark.parametrize("tied", [False, True])
def test_step_reads_what_it_multiplies_with_and_no_table_that_it_only_looks_into(tied):
    step = costs(tied=tied)
    assert step.flops_per_token == 2 * PRODUCTS
    assert step.weight_bytes == pytest.approx(2 * (PRODUCTS + NORMS), rel=0.01)  # rotary frequencies beside


def test_of_its_context_a_token_reads_keys_and_values_and_multiplies_with_them():
    step = costs()
    assert step.cache_bytes_per_token == LAYERS * 2 * 32 * 2
    assert step.flops_per_looked_at == LAYERS * 4 * 2 * (16 + 16)


def test_devices_share_weights_and_products_and_add_up_twice_a_layer_and_once_for_the_embedding():
    alone, shared = costs(), costs(devices=2)
    assert alone.all_reduces == 0
    assert shared.all_reduces == 2 * LAYERS + 1
    assert shared.flops_per_token == alone.flops_per_token / 2
    assert shared.weight_bytes == pytest.approx(alone.weight_bytes / 2, rel=0.01)


def test_layers_of_the_decoder_have_ten_kernels_quantized_or_not() -> None:
    for quantization in (None, "int4"):
        two, three = (costs(layers, quantization=quantization).kernels for layers in (2, 3))
        assert three - two == 10


EXPERTS, CHOSEN, WIDTH = 16, 2, 48
OF_EXPERTS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH  # weights


def costs_of_a_mixture(devices: int = 1) -> StepCosts:
    config = Qwen3MoeConfig(
        **SHAPE,
        **HEADS,
        head_dim=16,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=WIDTH,
    )
    model = ModelSkeleton(config, "m", torch.bfloat16)
    return step_costs(model, EngineSettings(model="m", tensor_parallel=devices))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(("tokens", "different"), [(1, 2), (2, 3.75), (5, 7.794), (1000, 16)])
def test_step_of_a_mixture_reads_the_different_experts_of_its_tokens(tokens: int, different: float) -> None:
    step = costs_of_a_mixture()
    assert step.expert_bytes == 2 * OF_EXPERTS
    expected = step.weight_bytes + step.expert_bytes * different / EXPERTS
    assert step.weights_read(1, tokens) == pytest.approx(expected, rel=1e-3)
    assert costs().weights_read(1, tokens) == costs().weight_bytes


def test_token_of_a_mixture_multiplies_with_the_experts_that_it_chose() -> None:
    others = LAYERS * (HIDDEN * HIDDEN * 2 + HIDDEN * 32 * 2 + HIDDEN * EXPERTS) + HIDDEN * VOCAB
    assert costs_of_a_mixture().flops_per_token == 2 * (others + OF_EXPERTS * CHOSEN / EXPERTS)


def test_devices_share_experts() -> None:
    assert costs_of_a_mixture(devices=2).expert_bytes == OF_EXPERTS


def device_s(step: StepCosts, tokens: float, context: float = 0.0, sequences: float = 1.0) -> float:
    size = StepSize(sequences, sequences * tokens, context_tokens=sequences * context)
    return step.device_seconds(H100, size)


def test_step_takes_the_longer_of_reading_and_computing_beside_its_kernels() -> None:
    step = replace(costs(), weight_bytes=10**9, flops_per_token=2e9, layers=0)
    beside_s = step.kernels * KERNEL_S
    assert device_s(step, 1) == device_s(step, 2) == pytest.approx(10**9 / (MEMORY * 3.35e12) + beside_s)
    assert device_s(step, 1, sequences=512) - beside_s == pytest.approx(512 * 2e9 / (ARITHMETIC * 989e12))


@pytest.mark.parametrize(
    ("context", "batches"),
    [(0, 0), (100, 1), (4096, 1), (4097, 4), (20480, 4), (20481, 16)],
)
def test_attention_of_a_sequence_takes_as_long_as_its_longest_part(context: int, batches: int) -> None:
    step = replace(costs(), layers=10, programs=1, third_part=16 * 128, cache_bytes_per_token=1.0)
    taken = device_s(step, 1, context) - device_s(replace(step, layers=0), 1, context)
    assert taken == pytest.approx(10 * batches * SLOTS_S)


def test_attention_of_more_parts_than_programs_takes_turns() -> None:
    step = replace(costs(), layers=10, programs=8, cache_bytes_per_token=1.0)
    none, few, many = (
        device_s(replace(step, layers=layers), 1, 1024, sequences)
        for layers, sequences in ((0, 4), (10, 4), (10, 5))
    )
    assert few - none == pytest.approx(10 * SLOTS_S)
    assert many - none == pytest.approx(2 * 10 * SLOTS_S)


def test_attention_of_many_sequences_reads_their_cache() -> None:
    step = replace(costs(), layers=10, cache_bytes_per_token=1e6)
    taken = device_s(step, 1, 4096, sequences=64) - device_s(replace(step, layers=0), 1, 4096, sequences=64)
    assert taken == pytest.approx(64 * 4096 * 1e6 / (MEMORY * 3.35e12))


def test_exchange_of_more_rows_takes_longer_and_over_a_slower_link_more_so() -> None:
    step = replace(costs(devices=2), weight_bytes=0, flops_per_token=0.0, row_bytes=10**6)
    few, many = StepSize(1, 1), StepSize(10, 10)
    over_nvlink, over_pcie = (
        step.device_seconds(device, many) - step.device_seconds(device, few) for device in (H100, L4)
    )
    assert over_nvlink > 0
    assert over_pcie > 10 * over_nvlink


def test_step_in_rounds_waits_for_the_host_and_an_early_step_hides_it() -> None:
    size = StepSize(8, 8, context_tokens=1000)
    step = costs()
    device, host = step.device_seconds(H100, size), HOST.seconds(size)
    assert step.seconds(H100, size) == device + host
    assert step.seconds(H100, size, is_early=True) == host > device
    assert replace(step, following_host=NO_HOST).seconds(H100, size, is_early=True) == device


def test_other_ranks_are_told_of_a_step_alike_for_any_context() -> None:
    step, few, many = (
        costs(devices=2),
        StepSize(1, 1, context_tokens=10),
        StepSize(1, 1, context_tokens=10**6),
    )
    told = [
        step.seconds(H100, size) - step.device_seconds(H100, size) - HOST.seconds(few) for size in (few, many)
    ]
    assert 0.0 < told[0] == pytest.approx(told[1])


@pytest.mark.parametrize(
    "size",
    [
        StepSize(1, FEW_QUERIES + 1),
        StepSize(1, 1, prompt_tokens=CAPTURED_SIZES[-1]),
        StepSize(CAPTURED_SIZES[-1] + 1, CAPTURED_SIZES[-1] + 1),
    ],
    ids=["many tokens of a sequence", "long prompt", "many sequences"],
)
def test_step_without_a_graph_takes_as_long_as_launching_its_kernels(size: StepSize) -> None:
    step = costs()
    assert step.device_seconds(H100, size) == step.kernels * LAUNCH_S
    for captured in (StepSize(1, FEW_QUERIES), StepSize(1, 1, prompt_tokens=64)):
        assert step.device_seconds(H100, captured) < step.kernels * LAUNCH_S
    assert replace(step, has_graphs=False).device_seconds(H100, StepSize(1, 1)) == step.kernels * LAUNCH_S


@pytest.mark.parametrize(("has_graphs", "expected"), [(True, NO_HOST), (False, HOST)])
def test_positions_of_a_draft_are_the_devices_alone_if_they_are_captured(has_graphs, expected) -> None:
    settings = EngineSettings(model="m", is_draft=True, graphs=has_graphs)
    config = LlamaConfig(**SHAPE, **HEADS, num_hidden_layers=1)
    step = step_costs(ModelSkeleton(config, "m", torch.bfloat16), settings)
    assert step.following_host == expected
    assert step.host == HOST
