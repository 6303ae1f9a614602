"""Kernels between a layer's products compute what torch's operations do.

Those of Triton are interpreted where there is no GPU; the compiled ones are for a CPU.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.engine.cache.key_values import KeyValues
from outrider.engine.cache.narrow import NARROW, Scales, narrowed
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.batch import paged_batch
from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.forward.layer_operations import Heads, LayerOperations, Norm, PlainOperations
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed
from outrider.engine.kernels.cpu.functions import compiled
from tests.support.paged_attention import moved, paged_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}  # absolute and relative, for products near 4
BLOCK_SIZE = 8

Made = Callable[[], LayerOperations]


def of_triton() -> LayerOperations:
    layer = pytest.importorskip(
        "outrider.engine.forward.cuda_operations", reason="needs triton: pip install triton"
    )
    operations: LayerOperations = layer.FusedOperations((9, 0))
    return operations


def of_cpu() -> LayerOperations:
    if DEVICE != "cpu" or compiled() is None:
        pytest.skip("Outrider was installed without a C++ compiler, or tests run on a GPU")
    return CpuOperations()


KERNELS = pytest.mark.parametrize(
    ("made", "dtype"),
    [(of_triton, torch.float32), (of_triton, torch.float16), (of_cpu, torch.float32)],
)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def norm(*shape: int, dtype: torch.dtype) -> Norm:
    made = Norm(random(*shape, dtype=dtype), 1e-5)
    made.least = made.least.to(DEVICE)
    return made


def assert_close(ours: Tensor, plain: Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)


@KERNELS
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (5, 100), (3, 2048)])
def test_rows_are_normed(num_tokens: int, size: int, made: Made, dtype: torch.dtype) -> None:
    rows, of = random(num_tokens, size, dtype=dtype), norm(size, dtype=dtype)
    assert_close(made().normed(rows, of), PlainOperations().normed(rows, of))


@KERNELS
@pytest.mark.parametrize("normed", ["no heads", "each head", "heads together"])
@pytest.mark.parametrize(
    ("queries", "kv", "dim", "turning"), [(4, 2, 16, 16), (9, 3, 24, 24), (8, 8, 64, 64), (4, 2, 16, 8)]
)
def test_heads_are_rotated_and_stored(
    queries: int, kv: int, dim: int, turning: int, normed: str, made: Made, dtype: torch.dtype
) -> None:
    """And nothing else in the cache changes."""
    feeds = [
        Feed([0] * 5, 1, 3, HeldBlocks([2, 0]), None),
        Feed([0], 1, 0, HeldBlocks([4]), None),
    ]
    fed = moved(paged_input(feeds, BLOCK_SIZE), torch.device(DEVICE))
    batch = paged_batch(fed, fed.logit_rows, BLOCK_SIZE, dtype)
    groups = {"each head": [(queries + kv, dim)], "heads together": [(1, queries * dim), (1, kv * dim)]}
    norms = tuple(norm(*group, dtype=dtype) for group in groups.get(normed, ()))
    heads = Heads(0, queries, kv, dim, norms)
    product = random(6, queries + 2 * kv, dim, dtype=dtype)
    rotation = random(6, 1, turning, dtype=dtype), -random(6, 1, turning, dtype=dtype)
    found = []
    for operations in (made(), PlainOperations()):
        cache = KeyValues({0: (kv, dim, dim)}, 5, BLOCK_SIZE, dtype, torch.device(DEVICE))
        query = operations.rotated_and_stored(product.clone(), heads, rotation, Paged(batch, cache, None))
        found.append((query, cache.keys[0], cache.values[0]))
    for ours, plain in zip(*found, strict=True):
        assert plain.any()
        assert_close(ours, plain)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@KERNELS
def test_heads_are_rounded_as_a_narrow_cache_stores_them(made: Made, dtype: torch.dtype) -> None:
    """Bit for bit: large, tiny, and not finite numbers too; halfway between two, to the even."""
    numbers = torch.tensor([*(2.0**power * 1.3 for power in range(-12, 14)), 0.0, 448, 464, 1e4, torch.inf])
    numbers = torch.cat([numbers, -numbers, torch.tensor([torch.nan, 1.0625])]).to(DEVICE, dtype)
    feeds = [Feed([0], 1, 3, HeldBlocks([2]), None)]
    fed = moved(paged_input(feeds, BLOCK_SIZE), torch.device(DEVICE))
    batch = paged_batch(fed, fed.logit_rows, BLOCK_SIZE, dtype)
    product = numbers.repeat(3, 1)[None]
    straight = torch.ones(1, 1, len(numbers)).to(product), torch.zeros(1, 1, len(numbers)).to(product)
    caches = []
    for operations in (made(), PlainOperations()):
        scales = {0: Scales(0.5, 4.0)}
        cache = KeyValues({0: (1, 64, 64)}, 5, BLOCK_SIZE, NARROW, torch.device(DEVICE), scales)
        heads = Heads(0, 1, 1, len(numbers), ())
        operations.rotated_and_stored(product.clone(), heads, straight, Paged(batch, cache, None))
        caches.append(cache)
    assert_equal(caches[0].keys[0], caches[1].keys[0])
    assert_equal(caches[0].values[0], caches[1].values[0])
    assert_equal(caches[0].values[0][19, 0], narrowed(numbers, NARROW, 4.0))


def assert_equal(ours: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours.float(), plain.float(), atol=0.0, rtol=0.0, equal_nan=True)


@KERNELS
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (7, 1500)])
def test_gates_are_opened(num_tokens: int, size: int, made: Made, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * size, dtype=dtype)
    assert_close(made().gated(gate_up), PlainOperations().gated(gate_up))


@pytest.mark.parametrize("made", [of_triton, of_cpu])
def test_operations_of_a_row_do_not_depend_on_other_rows(made: Made) -> None:
    rows, of, operations = random(9, 100), norm(100, dtype=torch.float32), made()
    assert torch.equal(operations.normed(rows[4:5], of), operations.normed(rows, of)[4:5])
    gate_up = 20 * random(9, 202)  # so that some gates are quite shut
    assert torch.equal(operations.gated(gate_up[4:5]), operations.gated(gate_up)[4:5])
