"""Every kind of tensor-parallel plan in transformers gives logits of one process, over processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions
from tests.support.ranks import Ranks

PROMPT = [5, 9, 33, 7, 120, 64, 8, 3, 91, 17]


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"block_size": 4, "cache_memory": 2**20, "dtype": "float32", "threads": 1}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


@torch.inference_mode()
def logits(group: RankGroup, settings: EngineSettings) -> torch.Tensor:
    """[tokens of the prompt, vocab_size] at rank 0, by the paged cache."""
    forward = load_forward_pass(settings, group)
    blocks = HeldBlocks(range(-(-len(PROMPT) // settings.block_size)))
    step = StepInput.of(forward.tables, [Feed(PROMPT, len(PROMPT), 0, blocks, None)])
    return forward.run(forward.prepare(step)).logits.clone()


def write_model(folder: Path, kind: str) -> Path:
    """Writes a checkpoint whose biases, sinks and norms of heads are random too."""
    write_checkpoint(folder, kind)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("bias", "sinks")):
            weight.normal_(0, 0.15)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.uniform_(0.5, 1.5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def expected_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        whole: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0]
    return whole


# Fused projections, norms over all heads, biases, a projection of queries, keys and values by heads.
@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", ["phi3", "olmo2", "glm4", "gpt_neox"])
@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=needs_functions)])
def test_ranks_of_a_plan_that_gathers_give_logits_of_one_process(
    ranks: Ranks, tmp_path: Path, kind: str, batch_invariant: bool
) -> None:
    folder = write_checkpoint(tmp_path, kind)
    shared = settings_of(folder, tensor_parallel=2, batch_invariant=batch_invariant)
    [found, _] = ranks.run(logits, logits, shared)
    torch.testing.assert_close(found, expected_logits(folder), rtol=1e-4, atol=1e-4)


# A mixture; norms over the heads of all ranks; sinks, and experts whose gates and ups alternate, with biases.
@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2", "gpt_oss"])
def test_ranks_that_share_attention_and_experts_give_logits_of_one_process(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    folder = write_model(tmp_path, kind)
    [found, _] = ranks.run(logits, logits, settings_of(folder, tensor_parallel=2))
    torch.testing.assert_close(found, expected_logits(folder), rtol=1e-4, atol=1e-4)


# Biases of keys and values, and norms of each head and of all heads, beside the plain kind.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "minimax_m2", "gpt_oss"])
def test_ranks_that_outnumber_key_value_heads_give_logits_of_one_process(
    four_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    folder = write_model(tmp_path, kind)
    [found, *_] = four_ranks.run(logits, logits, settings_of(folder, tensor_parallel=4))
    torch.testing.assert_close(found, expected_logits(folder), rtol=1e-4, atol=1e-4)
