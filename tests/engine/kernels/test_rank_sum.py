"""The kernel that sums up the ranks' parts adds them in the order of the ranks, and norms the sum."""

import pytest
import torch

from outrider.engine.parallel.sums import summed

layer = pytest.importorskip("outrider.engine.kernels.layer", reason="needs triton: pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts off what bfloat16 does not hold, where a GPU rounds.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
EPSILON = 1e-5


def parts_of(ranks: int, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns random parts, some of which are so large that another order of additions rounds otherwise."""
    generator = torch.Generator().manual_seed(ranks)
    parts = torch.randn(ranks, rows, size, generator=generator)
    return (parts * 10 ** torch.randint(0, 4, parts.shape, generator=generator)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "rows", "size"), [(2, 3, 100), (3, 1, 64), (4, 5, 256), (8, 2, 1000)])
def test_sum_is_that_of_the_ranks_in_their_order_bit_for_bit(
    ranks: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    parts = parts_of(ranks, rows, size, dtype)
    weight = torch.rand(size, device=DEVICE).to(dtype)
    states, normed = layer.sum_and_norm(parts, weight, EPSILON)
    assert torch.equal(states, summed(parts))
    expected = torch.empty_like(states)
    layer.norm(states[:, None], weight, EPSILON, expected[:, None])
    assert torch.equal(normed, expected)


def test_parts_of_this_test_give_another_sum_in_another_order() -> None:
    parts = parts_of(4, 5, 256, torch.float32)
    assert not torch.equal(summed(parts), summed(parts.flip(0)))


def test_sum_of_a_row_does_not_depend_on_other_rows() -> None:
    parts, weight = parts_of(4, 5, 256, torch.float16), torch.rand(256, device=DEVICE).half()
    alone = layer.sum_and_norm(parts[:, 3:4].contiguous(), weight, EPSILON)
    for of_row, of_rows in zip(alone, layer.sum_and_norm(parts, weight, EPSILON), strict=True):
        assert torch.equal(of_row, of_rows[3:4])
