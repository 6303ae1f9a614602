"""Mixtures on a GPU: near those of a CPU, the same for a row in any company.

Triton's interpreter computes them where there is no GPU.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.engine.forward.experts import SingleExperts
from outrider.engine.forward.layer_operations import PlainOperations, Routing
from outrider.engine.forward.linear import StoredLinear, joined
from tests.support.stored_weights import FORMS, INPUTS, moved, weight_of

experts = pytest.importorskip("outrider.engine.kernels.experts", reason="needs triton: pip install triton")
cuda_operations = pytest.importorskip("outrider.engine.forward.cuda_operations")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, SLOTS, WIDTH = 6, 3, INPUTS
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


ROUTINGS = {
    "softmax": Routing("softmax", 4, None, None, False, 1.0),
    "softmax to 1": Routing("softmax", 8, None, None, True, 1.0),
    "softmax of chosen": Routing("softmax of chosen", 3, None, None, True, 1.0),
    "sigmoid": Routing("sigmoid", 4, None, (1, 1), True, 2.5),
    "sigmoid in groups": Routing("sigmoid", 4, None, (4, 2), True, 2.5),
}


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("num_experts", [24, 512])
@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_is_that_of_torch(name: str, num_experts: int, has_ties: bool) -> None:
    logits = random(5, num_experts)
    logits = logits.round() if has_ties else logits
    correction = random(num_experts) if name.startswith("sigmoid") else None
    routing = Routing(**{**vars(ROUTINGS[name]), "correction": correction})
    found, weights = cuda_operations.FusedOperations((9, 0)).routed(logits, routing)
    expected, expected_weights = PlainOperations().routed(logits, routing)
    assert torch.equal(found, expected)
    torch.testing.assert_close(weights, expected_weights)


def choice(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, EXPERTS, generator=generator)
    scores[:, 1] = 0.0  # an expert that no row chooses
    weights, chosen = scores.topk(SLOTS)
    return chosen.to(DEVICE), weights.to(DEVICE)


def single(
    gate_up: Sequence[nn.Module], down: Sequence[nn.Module], clamped: tuple[float, float] | None
) -> SingleExperts:
    return SingleExperts([*zip(gate_up, down, strict=True)], clamped, PlainOperations(), None, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("more", [{}, {"clamped": (1.702, 0.5), "has_bias": True, "added": True}], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@torch.inference_mode()
def test_sum_of_experts_is_that_of_a_cpu(num_rows: int, more: dict[str, Any], dtype: torch.dtype) -> None:
    size, width, clamped = 64, 80, more.get("clamped")
    gate_up = random(EXPERTS, 2 * width, size, dtype=dtype) / 8
    down = random(EXPERTS, size, width, dtype=dtype) / 8
    biases = random(EXPERTS, 2 * width, dtype=dtype), random(EXPERTS, size, dtype=dtype)
    given: Any = biases if more.get("has_bias") else ([None] * EXPERTS, [None] * EXPERTS)
    rows, (chosen, weights) = random(num_rows, size, dtype=dtype), choice(num_rows)
    added = random(num_rows, size, dtype=dtype) if more.get("added") else None
    found = experts.multiply_chosen(
        rows,
        chosen,
        weights,
        gate_up.flatten(0, 1),
        down.flatten(0, 1),
        tuple(bias.flatten() if isinstance(bias, Tensor) else None for bias in given),
        clamped,
        added,
    )
    first, second = ([*map(joined, *pair)] for pair in zip((gate_up, down), given, strict=True))
    expected = single(first, second, clamped).multiply(rows, chosen, weights, added)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_sum_of_stored_experts_is_that_of_their_numbers(form: str) -> None:
    weights_of = (weight_of(form, seed, outputs)[0] for seed, outputs in ((0, 2 * WIDTH), (1, INPUTS)))
    gate_up, down = (moved(weight, DEVICE) for weight in weights_of)
    rows = random(3, INPUTS) / 100
    chosen, weights = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), random(3, 1)
    found = experts.multiply_chosen(rows, chosen, weights, gate_up, down, (None, None), None, None)
    by_single = single([StoredLinear(gate_up, None)], [StoredLinear(down, None)], None)
    expected = by_single.multiply(rows, chosen, weights)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.inference_mode()
def test_different_experts_that_rows_choose_are_counted() -> None:
    size, width = 64, 48
    gate_up, down = random(EXPERTS * 2 * width, size), random(EXPERTS * size, width)
    read = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for num_rows in (1, 40):
        rows, (chosen, weights) = random(num_rows, size), choice(num_rows)
        experts.multiply_chosen(rows, chosen, weights, gate_up, down, (None, None), None, None, read)
    assert read.item() == SLOTS + EXPERTS - 1  # 40 rows choose all but the expert that no row chooses


@torch.inference_mode()
def test_row_has_the_same_bits_alone_and_among_64_rows() -> None:
    size, width = 64, 48
    gate_up, down = random(EXPERTS * 2 * width, size), random(EXPERTS * size, width)
    rows, (chosen, weights) = random(64, size), choice(64)

    def summed(part: slice) -> Tensor:
        return experts.multiply_chosen(
            rows[part], chosen[part], weights[part], gate_up, down, (None, None), None, rows[part]
        )

    together = summed(slice(None))
    for place in (0, 17, 63):
        assert torch.equal(summed(slice(place, place + 1))[0], together[place])
    assert torch.equal(summed(slice(5, 38)), together[5:38])


@torch.inference_mode()
def test_expert_that_all_rows_choose_is_computed_in_several_tiles() -> None:
    size, width = 64, 48
    gate_up, down = random(EXPERTS * 2 * width, size) / 8, random(EXPERTS * size, width) / 8
    rows, weights = random(40, size), random(40, 1)
    chosen = torch.full((40, 1), EXPERTS - 1, dtype=torch.int64, device=DEVICE)
    found = experts.multiply_chosen(rows, chosen, weights, gate_up, down, (None, None), None, None)
    gate, up = (rows @ gate_up[-2 * width :].T).chunk(2, 1)
    expected = weights * ((nn.functional.silu(gate) * up) @ down[-size:].T)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
