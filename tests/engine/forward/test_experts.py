"""Mixtures of experts on a CPU: who chooses what, what is read, and that a row does not see its company."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.forward.experts import ExpertRouter, SingleExperts, count_read, replace_experts
from outrider.engine.forward.layer_operations import LayerOperations, PlainOperations, Routing
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.survey import survey
from outrider.engine.models.registry import architecture_of
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions
from tests.support.launching import settings_of

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss")
SIZE = 64  # hidden size of the checkpoints
ROWS = 64
LAST = 2  # a layer with experts


def mlp_of(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model, and its last layer's mixture."""
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(folder, kind), dtype=dtype).eval()
    return model, model.model.layers[LAST].mlp


def router_of(model: Any, mlp: Any) -> ExpertRouter:
    architecture = architecture_of(model)
    assert architecture is not None
    assert architecture.mixture is not None
    return ExpertRouter(architecture.mixture, mlp, PlainOperations())


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(count)).to(dtype)


def dense(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Weights of all experts, [rows, experts]."""
    return torch.zeros(len(chosen), experts).scatter_(1, chosen, weights.float())


@pytest.mark.parametrize("kind", MIXTURES)
@torch.inference_mode()
def test_router_chooses_and_weighs_as_transformers_does(kind: str, tmp_path: Path) -> None:
    model, mlp = mlp_of(tmp_path, kind)
    rows, experts = rows_of(ROWS), mlp.experts.num_experts
    extra = (mlp.e_score_correction_bias,) if kind == "minimax_m2" else ()
    _, weights, chosen = (mlp.router if kind == "gpt_oss" else mlp.gate)(rows, *extra)
    found, found_weights = router_of(model, mlp)(rows)
    torch.testing.assert_close(dense(found, found_weights, experts), dense(chosen, weights, experts))


def test_router_that_meets_equal_scores_takes_the_first_experts() -> None:
    routing = Routing("softmax", 3, None, None, True, 1.0)
    logits = torch.zeros(2, 512)
    logits[1, 400] = 1.0
    chosen, weights = PlainOperations().routed(logits, routing)
    assert chosen.tolist() == [[0, 1, 2], [400, 0, 1]]
    torch.testing.assert_close(weights.sum(1), torch.ones(2))


@pytest.mark.parametrize(
    ("groups", "best"), [(None, [4, 0]), ((2, 2), [4, 0]), ((2, 1), [4, 5]), ((3, 2), [4, 0])]
)
def test_router_of_groups_takes_experts_of_the_groups_with_the_best_pairs(
    groups: tuple[int, int] | None, best: list[int]
) -> None:
    logits = torch.tensor([[1.5, -3.0, -3.0, -3.0, 2.0, 1.0]])
    chosen, weights = PlainOperations().routed(logits, Routing("sigmoid", 2, None, groups, False, 2.0))
    assert chosen.tolist() == [best]
    torch.testing.assert_close(weights, 2.0 * logits[:, best].sigmoid())


def test_correction_decides_the_choice_and_not_the_weight() -> None:
    correction = torch.tensor([0.0, 5.0, 0.0])
    routing = Routing("sigmoid", 1, correction, None, False, 1.0)
    chosen, weights = PlainOperations().routed(torch.tensor([[2.0, -1.0, 0.0]]), routing)
    assert chosen.tolist() == [[1]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0]]).sigmoid())


def packed(folder: Path, kind: str, dtype: torch.dtype, rows: int = 1) -> tuple[SingleExperts, ExpertRouter]:
    model, mlp = mlp_of(folder, kind, dtype)
    is_exact = dtype == torch.float32
    operations: LayerOperations = CpuOperations() if is_exact else PlainOperations()
    replace_experts(model, operations, None, rows, are_joined=False)
    experts = mlp.experts
    assert isinstance(experts, SingleExperts)
    return experts, router_of(model, mlp)


@needs_functions
@pytest.mark.parametrize("kind", MIXTURES)
@torch.inference_mode()
def test_experts_compute_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    model, mlp = mlp_of(tmp_path, kind)
    rows = rows_of(ROWS)
    chosen = router_of(model, mlp)(rows)
    theirs = mlp.experts(rows, *chosen)
    replace_experts(model, CpuOperations(), None, 1, are_joined=False)
    torch.testing.assert_close(mlp.experts(rows, *chosen), theirs, atol=1e-5, rtol=1e-4)


@needs_functions
@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float32, ROWS), (torch.bfloat16, 16)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("kind", MIXTURES)
@torch.inference_mode()
def test_row_has_the_same_bits_alone_and_in_company(
    kind: str, dtype: torch.dtype, count: int, tmp_path: Path
) -> None:
    """An expert in bfloat16 takes the rows of a pass of batch-invariant numerics at a time."""
    experts, route = packed(tmp_path, kind, dtype, 1 if dtype == torch.float32 else count)
    rows = rows_of(count, dtype)
    together = experts.multiply(rows, *route(rows), rows)
    for place in range(count):
        alone = rows[place : place + 1]
        assert torch.equal(experts.multiply(alone, *route(alone), alone)[0], together[place])


@needs_functions
@torch.inference_mode()
def test_step_reads_the_experts_that_its_rows_chose_and_no_other(tmp_path: Path) -> None:
    experts, route = packed(tmp_path, "glm4_moe", torch.float32)
    read: list[int] = []

    def noted(product: Any) -> Callable[[Tensor], Tensor]:
        def multiply(rows: Tensor) -> Tensor:
            read.append(product.multiply.panels.nbytes)
            result: Tensor = product.multiply(rows)
            return result

        return multiply

    pairs: Any = experts.products
    experts._functions = [(noted(first), noted(second)) for first, second in pairs]
    of_each = sum(product.multiply.panels.nbytes for product in pairs[0])
    rows = rows_of(3)
    chosen, weights = route(rows)
    experts.multiply(rows, chosen, weights)
    assert sum(read) == of_each * len(chosen.unique()) < of_each * len(pairs)


def test_experts_that_passes_read_are_counted_over_all_layers(tmp_path: Path) -> None:
    model, _ = mlp_of(tmp_path, "glm4_moe")
    assert count_read(model, torch.device("cpu")) is None  # transformers' own do not count
    replace_experts(model, PlainOperations(), None, 1, are_joined=False)
    counted = count_read(model, torch.device("cpu"))
    assert counted is not None
    read, num_experts = counted
    layers = [layer.mlp.experts for layer in model.model.layers[1:]]  # the first layer is dense
    assert num_experts == 8 * len(layers) > 8
    with torch.inference_mode():
        for experts, chosen in zip(layers, ([[0, 1]], [[2, 3], [3, 4], [2, 4]]), strict=False):
            experts.multiply(rows_of(len(chosen)), torch.tensor(chosen), torch.ones(len(chosen), 2))
    assert read.item() == 2 + 3


def test_step_tells_the_share_of_experts_that_it_read(tmp_path: Path) -> None:
    """A token chooses two of eight experts in each layer that has experts."""
    engine = Engine.from_settings(settings_of(write_checkpoint(tmp_path, "glm4_moe"), device="cpu"))
    steps = [step for steps in survey(engine).values() for step in steps if not step.size.prompt_tokens]
    alone = {step.experts_read for step in steps if step.size.tokens == 1}
    together = [step.experts_read for step in steps if step.size.tokens > 1]
    assert alone == {2 / 8}
    assert all(2 / 8 <= read <= 1.0 for read in together)
    assert max(together) > 2 / 8


def test_step_of_a_draft_or_of_a_dense_model_counts_no_experts(tmp_path: Path) -> None:
    for kind, fields in (("qwen3", {}), ("glm4_moe", {"is_draft": True})):
        engine = Engine.from_settings(
            settings_of(write_checkpoint(tmp_path / kind, kind), device="cpu", **fields)
        )
        assert {step.experts_read for steps in survey(engine).values() for step in steps} == {0.0}
