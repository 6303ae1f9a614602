"""Product with a stored weight on a GPU: near the product of its numbers, the same for any number of rows.

Triton's interpreter computes it where there is no GPU.
"""

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.stored_weight import BITS, LEAST_SPAN, Kind, StoredWeight
from tests.support.stored_weights import FORMS, codes_of, moved, weight_of

product = pytest.importorskip(
    "outrider.engine.kernels.stored_product", reason="needs triton: pip install triton"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest error of a product by the sum of its terms' sizes: a rounding for each of 192 terms at most.
LARGEST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3}
COUNTS = (1, 5, 16, 17, 64, 70)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("kind", BITS)
def test_every_code_is_widened_to_its_value(kind: Kind) -> None:
    codes = torch.arange(2 ** BITS[kind])
    codes = torch.where((kind == "e4m3") & (codes & 127 == 127), 0, codes).to(torch.uint8)
    weight = moved(StoredWeight.of(kind, codes.view(-1, 16).repeat(1, 16 // BITS[kind])), DEVICE)
    one_at_a_time = torch.eye(weight.shape[1], device=DEVICE)
    for dtype in LARGEST_ERROR:
        assert torch.equal(product.multiply(one_at_a_time.to(dtype), weight).float(), weight.widened().T)


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("form", FORMS)
def test_product_is_that_of_the_weights_numbers(form: str, dtype: torch.dtype) -> None:
    weight = moved(weight_of(form, outputs=70)[0], DEVICE)
    numbers = weight.widened().double()
    rows, bias, added = (random(*shape, dtype=dtype) for shape in ((5, weight.shape[1]), (70,), (5, 70)))
    exact = rows.double() @ numbers.T
    sizes = rows.double().abs() @ numbers.abs().T + bias.abs() + added.abs()
    for found, expected in (
        (product.multiply(rows, weight), exact),
        (product.multiply(rows, weight, bias, added), exact + bias + added),
    ):
        assert found.dtype == dtype
        assert ((found - expected).abs() <= LARGEST_ERROR[dtype] * sizes).all()


@pytest.mark.parametrize("form", FORMS)
def test_row_has_the_same_bits_alone_and_beside_any_number_of_rows(form: str) -> None:
    weight = moved(weight_of(form)[0], DEVICE)
    rows = random(max(COUNTS), weight.shape[1], dtype=torch.float16)
    together = product.multiply(rows, weight)
    for count in COUNTS:
        assert torch.equal(product.multiply(rows[:count], weight), together[:count])
        assert torch.equal(product.multiply(rows[-count:], weight), together[-count:])


def test_outputs_have_the_same_bits_in_a_joined_weight_and_in_a_share() -> None:
    weight = moved(weight_of("fp8 in blocks", outputs=80)[0], DEVICE)
    rows = random(3, weight.shape[1], dtype=torch.float16)
    whole = product.multiply(rows, weight)
    assert torch.equal(product.multiply(rows, weight.outputs_at(24, 40)), whole[:, 24:64])


def test_groups_of_sixteen_inputs_are_multiplied() -> None:
    torch.manual_seed(0)
    scales = torch.rand(8, 8).bfloat16()
    weight = moved(StoredWeight.of("e2m1", codes_of("e2m1", 8, 128), scales), DEVICE)
    assert weight.span == LEAST_SPAN
    rows = random(2, 128, dtype=torch.float32)
    torch.testing.assert_close(product.multiply(rows, weight), rows @ weight.widened().T)
