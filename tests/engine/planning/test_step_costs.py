"""What a step reads, computes and launches, told from a config."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.planning.step_costs import ACCELERATORS, StepCosts, step_costs
from outrider.engine.settings import EngineSettings

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 64, 160, 3, 500
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # heads of 16 dimensions
PRODUCTS = LAYERS * (HIDDEN * HIDDEN * 2 + HIDDEN * 32 * 2 + 3 * HIDDEN * INTERMEDIATE) + HIDDEN * VOCAB
NORMS = (2 * LAYERS + 1) * HIDDEN


def costs(layers: int = LAYERS, devices: int = 1, tied: bool = False) -> StepCosts:
    config = LlamaConfig(**SHAPE, **HEADS, num_hidden_layers=layers, tie_word_embeddings=tied)
    model = ModelSkeleton(config, "m", torch.bfloat16)
    return step_costs(model, EngineSettings(model="m", tensor_parallel=devices))


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


def test_every_layer_launches_as_many_kernels():
    two, three, four = (costs(layers).kernels for layers in (2, 3, 4))
    assert four - three == three - two > 10


def test_step_takes_the_longer_of_reading_and_computing():
    step = replace(costs(), weight_bytes=10**9, flops_per_token=2e9)
    fast = ACCELERATORS["H100"]
    few, more, many = (step.seconds(fast, 1, tokens, 0) - step.constant_s for tokens in (1, 2, 10_000))
    assert few == more == pytest.approx(10**9 / (0.8 * 3.35e12))
    assert many == pytest.approx(10_000 * 2e9 / (0.5 * 989e12))
