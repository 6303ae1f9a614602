"""Kernels of libraries refuse what the real ones refuse; Triton's run in its interpreter."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.attention.varlen import varlen_attn

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.kernels import FA2, FA3, FlashBackend

pytestmark = needs_compiler
PAGE = 256


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
def test_a_triton_kernel_is_launched_captured_and_replayed(cuda: SimulatedCuda) -> None:
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
def test_a_triton_kernel_wants_its_tensors_on_the_current_device(cuda: SimulatedCuda) -> None:
    left = torch.zeros(6, device="cuda")
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        add(left, torch.zeros(6))
    torch.cuda.set_device(1)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        add(left, left)


@interpreted
def test_without_the_device_the_interpreter_takes_tensors_of_the_cpu() -> None:
    assert add(torch.ones(3), torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def paged(
    *,
    page: int = PAGE,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.dtype = torch.int32,
    key_starts: bool = True,
    num_splits: int | None = 1,
) -> Any:
    """Two queries of one sequence and one of another, over pages in disorder, of ones and of twos."""
    query = torch.ones(3, 4, 16, dtype=dtype, device="cuda")
    stored = (
        torch.arange(4, dtype=dtype, device="cuda")[:, None, None, None].expand(4, page, 2, 16).contiguous()
    )
    lengths = torch.tensor([page + 1, 3], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 2, 3], dtype=torch.int32, device="cuda")
    table = torch.tensor([[1, 3], [2, 0]], dtype=index, device="cuda")
    return varlen_attn(
        query,
        stored,
        stored,
        starts,
        starts if key_starts else None,
        2,
        page + 1,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=lengths,
        block_table=table,
        num_splits=num_splits,
    )


def test_paged_attention_is_computed() -> None:
    cases: list[tuple[FlashBackend, dict[str, Any]]] = [(FA2, {}), (FA3, {"key_starts": False, "page": 16})]
    for flash, wanted in cases:
        with simulated_cuda(flash=flash) as cuda:
            output = paged(**wanted).float()
            assert output[0].unique().tolist() == [1.0]  # all of the first page
            assert float(output[1, 0, 0]) > 1.0  # the first token of the second, of threes, too
            assert output[2].unique().tolist() == [2.0]
            assert any("flash_attention" in cause for cause in cuda.counts.launches)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key_starts": False}, "both set or both not set"),
        ({"page": 16}, "divisible by 256"),
        ({"dtype": torch.float32}, "fp16 and bf16"),
        ({"index": torch.int64}, "dtype torch.int32"),
        ({"num_splits": None}, "num_splits"),
    ],
)
def test_what_fa2_refuses(cuda: SimulatedCuda, wrong: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        paged(**wrong)


def test_what_fa3_refuses() -> None:
    with simulated_cuda(flash=FA3):
        with pytest.raises(RuntimeError, match="page table is not supported"):
            paged()
        with pytest.raises(RuntimeError, match="fp16 and bf16"):
            paged(key_starts=False, dtype=torch.float32)
