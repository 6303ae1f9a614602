"""Kernels between a layer's products compute what torch's operations do; without a GPU, interpreted."""

import pytest
import torch
from torch import Tensor

from outrider.engine.cache.paged_cache import KeyValues
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import paged_batch
from outrider.engine.forward.layer_operations import Heads, Norm, PlainOperations
from outrider.engine.step_input import Feed
from tests.support.paged_attention import paged_input

layer = pytest.importorskip("outrider.engine.kernels.layer", reason="needs triton: pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}  # of products near 4
BLOCK_SIZE = 8


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def norm(*shape: int, dtype: torch.dtype) -> Norm:
    made = Norm(random(*shape, dtype=dtype), 1e-5)
    made.least = made.least.to(DEVICE)
    return made


def assert_close(ours: Tensor, plain: Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (5, 100), (3, 2048)])
def test_rows_are_normed(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    rows, of = random(num_tokens, size, dtype=dtype), norm(size, dtype=dtype)
    assert_close(layer.FusedOperations().normed(rows, of), PlainOperations().normed(rows, of))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("queries", "kv", "dim"), [(4, 2, 16), (9, 3, 24), (8, 8, 64)])
def test_heads_are_rotated_and_stored(
    queries: int, kv: int, dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """And nothing else in the cache changes."""
    feeds = [
        Feed([0] * 5, 1, 3, torch.tensor([2, 0]).numpy(), None),
        Feed([0], 1, 0, torch.tensor([4]).numpy(), None),
    ]
    given = paged_input(feeds, BLOCK_SIZE)
    batch = paged_batch(given, given.logit_rows, BLOCK_SIZE, dtype)
    heads = Heads(0, queries, kv, dim, norm(queries + kv, dim, dtype=dtype) if has_norm else None)
    product = random(6, queries + 2 * kv, dim, dtype=dtype)
    rotation = random(6, 1, dim, dtype=dtype), -random(6, 1, dim, dtype=dtype)
    found = []
    for operations in (layer.FusedOperations(), PlainOperations()):
        cache = KeyValues({0: (kv, dim, dim)}, 5, BLOCK_SIZE, dtype, torch.device(DEVICE))
        query = operations.rotated_and_stored(product.clone(), heads, rotation, Paged(batch, cache, None))
        found.append((query, cache.keys[0], cache.values[0]))
    for ours, plain in zip(*found, strict=True):
        assert plain.any()
        assert_close(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (7, 1500)])
def test_gates_are_opened(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * size, dtype=dtype)
    assert_close(layer.FusedOperations().gated(gate_up), PlainOperations().gated(gate_up))


def test_a_row_does_not_depend_on_its_company() -> None:
    rows, of = random(9, 64), norm(64, dtype=torch.float32)
    together = layer.FusedOperations().normed(rows, of)
    assert torch.equal(layer.FusedOperations().normed(rows[4:5], of), together[4:5])
