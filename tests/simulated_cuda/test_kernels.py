"""Triton's kernels run in its interpreter."""

import os
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

pytestmark = needs_compiler


@triton.jit
def add_kernel(left, right, output, size, BLOCK: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.load(left + places, mask=inside) + tl.load(right + places, mask=inside)
    tl.store(output + places, total, mask=inside)


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(left)
    add_kernel[(triton.cdiv(len(left), 4),)](left, right, output, len(left), BLOCK=4)
    return output


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as cuda:
        yield cuda


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@interpreted
def test_triton_kernel_is_launched_captured_and_replayed(cuda: SimulatedCuda) -> None:
    left, right = torch.arange(6.0, device="cuda"), torch.ones(6, device="cuda")
    cuda.counts = type(cuda.counts)()
    assert add(left, right).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    ((cause, count),) = cuda.counts.launches.items()
    assert (cause.split()[-1], count) == ("add_kernel", 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = add(left[1:], right[1:]) * 2
    left.fill_(10.0)
    right[2] = 5.0
    graph.replay()
    assert output.tolist() == [22.0, 30.0, 22.0, 22.0, 22.0]


@interpreted
def test_triton_kernel_refuses_tensors_of_another_device(cuda: SimulatedCuda) -> None:
    left = torch.zeros(6, device="cuda")
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        add(left, torch.zeros(6))
    torch.cuda.set_device(1)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        add(left, left)


@interpreted
def test_interpreter_without_the_device_takes_tensors_of_the_cpu() -> None:
    assert add(torch.ones(3), torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


@triton.jit
def product_kernel(left, right, output, SIZE: tl.constexpr):  # noqa: N803
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    product = tl.dot(tl.load(left + places), tl.load(right + places), input_precision="ieee")
    tl.store(output + places, product)


@interpreted
def test_product_gives_a_row_the_same_bits_at_any_place(cuda: SimulatedCuda) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 16, generator=generator).cuda() for _ in range(2))
    order = torch.randperm(16, generator=generator)
    results = []
    for rows in (left, left[order.cuda()]):
        results.append(torch.empty(16, 16, device="cuda"))
        product_kernel[(1,)](rows, right, results[-1], SIZE=16)
    first, moved = (result.cpu() for result in results)
    assert torch.equal(moved, first[order])
    torch.testing.assert_close(first, left.cpu() @ right.cpu(), atol=1e-5, rtol=0)
