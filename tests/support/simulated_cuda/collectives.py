"""NCCL between simulated devices of several processes: gloo transports data, NCCL's rules are checked."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work

from tests.support.simulated_cuda.tensor import SimulatedTensor, mapped, numbers_of, tensors_in

if TYPE_CHECKING:
    from tests.support.simulated_cuda.device import SimulatedCuda

c10d = torch.ops.c10d
init_process_group = dist.init_process_group


def init_group(backend: str, **options: Any) -> None:
    """Replaces torch.distributed.init_process_group."""
    assert backend == "cpu:gloo,cuda:nccl", "what lies on a GPU travels by NCCL"
    init_process_group("gloo", **options)


def collective(cuda: "SimulatedCuda", func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a collective. During the capture of a graph it is only recorded, and runs at each replay."""
    given = tensors_in(args)
    if not all(isinstance(tensor, SimulatedTensor) for tensor in given):
        raise RuntimeError("No backend type associated with device type cpu")
    cuda.check_devices(func, args, kwargs)
    called = [str(func), [(tuple(tensor.shape), str(tensor.dtype)) for tensor in _inputs(func, args)]]
    arguments = mapped(numbers_of, args)

    def run() -> None:
        _check_order(called)
        result = func(*arguments, **kwargs)
        Work.unbox(result[1] if isinstance(result, tuple) else result).wait()

    cuda.launched(func)
    if cuda.capturing is None:
        run()
    else:
        cuda.capturing.record(run)
    done = FakeWork().boxed()
    return done if func is c10d.gather_.default else (args[0], done)


def _inputs(func: Any, args: Any) -> list[torch.Tensor]:
    """Returns the inputs of a rank, whose shapes must be equal at all ranks."""
    return tensors_in(args[0] if func in IN_PLACE else args[1])


def _check_order(called: object) -> None:
    """Raises RuntimeError if ranks make different calls: NCCL would deadlock or mix up data."""
    others: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(others, called)
    if any(other != called for other in others):
        raise RuntimeError(f"the ranks of a group call NCCL in different orders: {others}")


IN_PLACE = (c10d.allreduce_.default, c10d.broadcast_.default)
COLLECTIVES = dict.fromkeys((*IN_PLACE, c10d.gather_.default, c10d._allgather_base_.default), collective)
