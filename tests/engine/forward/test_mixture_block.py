"""Mixtures of experts beside recurrent states: a token's result has the same bits in any company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.forward.experts import Experts, replace_experts
from outrider.engine.forward.layer_operations import LayerOperations, PlainOperations
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.forward.mixture_block import MixtureBlock, MixtureRouter, use_mixture_blocks
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions

BLOCKS = {  # path to a block in each kind of model
    "qwen3_next": "model.layers.2.mlp",
    "qwen3_5_moe_text": "model.layers.2.mlp",
    "nemotron_h": "model.layers.1.mixer",
}
ROWS = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[*BLOCKS])
def kind(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Any:
    more = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2} if kind == "nemotron_h" else {}
    return AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, kind, **more)).eval()


def use_blocks(model: Any, operations: LayerOperations) -> None:
    assert replace_experts(model, operations, None, 1, are_joined=False)
    use_mixture_blocks(model, operations)


@torch.inference_mode()
def test_block_computes_what_transformers_block_computes(model: Any, kind: str) -> None:
    expected = model.get_submodule(BLOCKS[kind])(ROWS)
    use_blocks(model, PlainOperations())
    block = model.get_submodule(BLOCKS[kind])
    assert isinstance(block, MixtureBlock) or isinstance(block.gate, MixtureRouter)
    assert isinstance(block.experts, Experts)
    torch.testing.assert_close(block(ROWS), expected)


@needs_functions
@torch.inference_mode()
def test_token_has_the_same_bits_alone_and_beside_any_number_of_tokens(model: Any, kind: str) -> None:
    use_blocks(model, CpuOperations())
    optimize_for_cpu(model)
    block = model.get_submodule(BLOCKS[kind])
    together = block(ROWS)
    for count in (*range(1, 18), 33, 99):
        parts = ROWS.split(count, dim=1)
        assert torch.equal(torch.cat([block(part) for part in parts], 1), together), count
