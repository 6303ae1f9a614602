"""The simulated GPU refuses what CUDA refuses, and counts what costs time."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.graphs import KERNEL_MS
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

pytestmark = needs_compiler


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as cuda:
        yield cuda


def on_device(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


def spent(cuda: SimulatedCuda) -> dict[str, int]:
    """Since it was asked last; without what there was none of."""
    totals = {name: count for name, count in cuda.counts.totals().items() if count}
    cuda.counts = type(cuda.counts)()
    return totals


def test_numbers_are_right_and_on_the_device(cuda: SimulatedCuda) -> None:
    made = on_device(1, 2, 3)
    assert (made.device, made.is_cuda) == (torch.device("cuda:0"), True)
    assert ((made * 2 + 1)[1:]).tolist() == [5, 7]
    assert made.to("cuda") is made


def test_tensors_of_several_devices_do_not_mix(cuda: SimulatedCuda) -> None:
    here = on_device(1, 2)
    with pytest.raises(RuntimeError, match="same device, but found cpu and cuda:0"):
        here + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device, but found cuda:0 and cuda:1"):
        here + torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(2)[here.long()]
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        here.numpy()
    assert (here + torch.tensor(1.0)).tolist() == [2, 3]  # a number may come from the CPU


def test_simulated_cuda_has_the_requested_number_of_devices(cuda: SimulatedCuda) -> None:
    torch.cuda.set_device(1)
    assert torch.zeros(1, device="cuda").device == torch.device("cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:2")


def test_launches_are_counted_but_not_views(cuda: SimulatedCuda) -> None:
    made = torch.zeros(4, 4, device="cuda")
    assert spent(cuda) == {"launches": 1}
    made[1:].t().unsqueeze(0).expand(2, -1, -1).unbind(0)
    torch.empty_like(made)
    assert spent(cuda) == {}
    made.add_(1).relu()
    torch.nn.functional.linear(made, made)
    assert spent(cuda) == {"launches": 3}


def test_simulated_cuda_counts_name_their_places(cuda: SimulatedCuda) -> None:
    on_device(1).add(1)
    (cause,) = cuda.counts.launches
    assert cause.startswith("tests/simulated_cuda/test_rules.py:")
    assert cause.endswith("aten.add.Tensor")
    assert f"1 x {cause}" in cuda.counts.report()


def test_copy_in_waits_unless_it_is_non_blocking(cuda: SimulatedCuda) -> None:
    on_device(1)
    assert spent(cuda) == {"pageable_copies": 1, "waits": 1}
    torch.ones(1).to("cuda", non_blocking=True)
    assert spent(cuda) == {"pageable_copies": 1}
    pinned = torch.ones(2, pin_memory=True)
    assert pinned.is_pinned()
    assert not torch.ones(2).is_pinned()
    pinned[1:].to("cuda", non_blocking=True)
    torch.ones(2).pin_memory().to("cuda", non_blocking=True)
    assert spent(cuda) == {"pinned_copies": 2}
    torch.zeros(2, device="cuda").copy_(pinned)
    assert spent(cuda) == {"launches": 1, "pinned_copies": 1, "waits": 1}


def test_reading_a_value_is_a_copy_out_and_a_wait(cuda: SimulatedCuda) -> None:
    made = on_device(0, 2, 3)
    spent(cuda)
    asks: list[Callable[[], object]] = [
        made[0].item,
        made.tolist,
        made.cpu,
        lambda: bool(made[0]),
        made.nonzero,
    ]
    for ask in asks:
        ask()
        assert spent(cuda) == {"copies_out": 1, "waits": 1}, ask
    torch.cuda.synchronize()
    torch.cuda.current_stream().synchronize()
    torch.cuda.Event().synchronize()
    assert spent(cuda) == {"waits": 3}


def test_indexing_costs_launches_and_copies(cuda: SimulatedCuda) -> None:
    made, places = torch.zeros(3, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    mask = made == 0
    spent(cuda)
    made[places]
    assert spent(cuda) == {"launches": 1}
    made[torch.ones(1, dtype=torch.int64)]
    assert spent(cuda) == {"launches": 1, "pageable_copies": 1, "waits": 1}
    made[mask]
    assert spent(cuda) == {"launches": 2, "copies_out": 1, "waits": 1}
    made[places] = 1.0  # torch makes the number a tensor of the CPU
    assert spent(cuda) == {"launches": 1, "pageable_copies": 1, "waits": 1}
    made.index_fill_(0, places, 1.0)
    assert spent(cuda) == {"launches": 1}
    made[mask] = torch.tensor(1.0)
    assert spent(cuda) == {"launches": 1}  # a fill by the mask
    with pytest.raises(RuntimeError, match="same device"):
        made[places.expand(2)] = torch.ones(2)


def test_copy_out_arrives_after_a_wait(cuda: SimulatedCuda) -> None:
    """So whoever reads before reads something else."""
    target, early, late = torch.zeros(2, pin_memory=True), torch.cuda.Event(), torch.cuda.Event()
    early.record()
    target.copy_(on_device(1, 2), non_blocking=True)
    late.record()
    early.synchronize()
    assert target.tolist() == [0, 0]
    late.synchronize()
    assert target.tolist() == [1, 2]


def test_events_tell_the_device_s_time_once_they_were_reached(cuda: SimulatedCuda) -> None:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    made = on_device(1, 2)
    started.record()
    made.add_(1).relu_()
    with pytest.raises(ValueError, match="must be recorded"):
        started.elapsed_time(ended)
    ended.record()
    with pytest.raises(torch.AcceleratorError, match="not ready"):
        started.elapsed_time(ended)
    torch.cuda.synchronize()
    assert started.elapsed_time(ended) == pytest.approx(2 * KERNEL_MS)
    untimed = torch.cuda.Event()
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        started.elapsed_time(untimed)


def test_pinned_memory_is_not_to_change_while_it_is_copied_from(cuda: SimulatedCuda) -> None:
    pinned = torch.zeros(2, pin_memory=True)
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned[0] = 1.0
    pinned.to("cuda", non_blocking=True)
    pinned[0] = 2.0
    with pytest.raises(RuntimeError, match="while it was still copied from"):
        torch.cuda.synchronize()


def test_models_run_on_it_in_inference_mode(cuda: SimulatedCuda) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    fed = torch.randn(2, 5, 16)
    expected = layer(fed)
    moved = layer.to("cuda")
    with torch.inference_mode():
        assert torch.allclose(moved(fed.to("cuda")).cpu(), expected, atol=1e-6)
