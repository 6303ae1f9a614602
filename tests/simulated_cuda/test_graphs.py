"""A captured graph does its work again on the same memory, and holds nothing that CUDA could not capture."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

pytestmark = needs_compiler


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as cuda:
        yield cuda


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph, output


def test_replay_reads_the_present_inputs(cuda: SimulatedCuda) -> None:
    static, store = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def work() -> torch.Tensor:
        store.copy_(static + 1)
        return torch.stack([store[:2], static[2:]]).t().contiguous() * 2

    graph, output = captured(work)
    before = cuda.counts.launches.total()
    static.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"))
    graph.replay()
    assert cuda.counts.launches.total() - before == 2  # launches: the copy, and the graph
    assert output.tolist() == [[4.0, 6.0], [6.0, 8.0]]
    assert store.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_pinned_copies_are_part_of_a_graph(cuda: SimulatedCuda) -> None:
    fed, answer = torch.zeros(2, pin_memory=True), torch.zeros(2, pin_memory=True)

    def work() -> torch.Tensor:
        return answer.copy_(fed.to("cuda", non_blocking=True) + 1, non_blocking=True)

    graph, _ = captured(work)
    cuda.counts = type(cuda.counts)()
    fed += 4
    graph.replay()
    torch.cuda.synchronize()
    assert answer.tolist() == [5.0, 5.0]
    assert cuda.counts.totals() == {
        "launches": 1,
        "pinned_copies": 1,
        "pageable_copies": 0,
        "copies_out": 1,
        "waits": 1,
        "busy_waits": 0,
    }


NOT_CAPTURED: dict[str, Callable[[torch.Tensor], object]] = {
    "a number read": lambda made: made[0].item(),
    "a copy out": lambda made: made.tolist(),
    "indices of a mask": lambda made: made[made > 0],
    "a pageable copy in": lambda made: made.copy_(torch.ones(2), non_blocking=True),
    "a blocking copy in": lambda made: made.copy_(torch.ones(2, pin_memory=True)),
    "synchronize": lambda made: torch.cuda.synchronize(),
    "an event's query": lambda made: torch.cuda.Event().query(),
    "another device": lambda made: torch.zeros(1, device="cuda:1"),
}


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_capture_of_a_forbidden_call_raises(cuda: SimulatedCuda, name: str) -> None:
    made = torch.ones(2, device="cuda")
    with pytest.raises(torch.AcceleratorError, match="capture") as raised:
        captured(lambda: NOT_CAPTURED[name](made))
    assert "not permitted when stream is capturing" in str(raised.value.__context__)
    captured(lambda: made + 1)  # the next one can be


def test_capture_that_failed_stays_failed(cuda: SimulatedCuda) -> None:
    made = torch.ones(2, device="cuda")

    def work() -> torch.Tensor:
        with pytest.raises(torch.AcceleratorError):
            made.tolist()
        return made + 1

    with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
        captured(work)


def test_capture_wants_a_stream_of_its_own_and_replay_a_capture(cuda: SimulatedCuda) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    with pytest.raises(RuntimeError, match="preceding successful capture"):
        torch.cuda.CUDAGraph().replay()
