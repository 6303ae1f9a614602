"""A rank's share of a model with meta tensors, after transformers' plan and our layers were applied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from outrider.engine.forward.attention import ATTENTION
from outrider.engine.forward.delta_net import share_delta_nets
from outrider.engine.forward.latent import use_latents
from outrider.engine.parallel.layers import use_parallel_layers


@contextmanager
def group_of(size: int) -> Iterator[None]:
    """Context with a fake group: this process is rank 0, and the other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(config: Any, size: int) -> Any:
    """Returns rank 0's share of a model, with meta tensors."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
    apply_tensor_parallelism(model, init_device_mesh("cpu", (size,)), plan)
    use_parallel_layers(model)
    share_delta_nets(model)
    use_latents(model, ATTENTION)
    return model


def bytes_of(model: Any) -> int:
    tensors = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    return sum(tensor.nbytes for tensor in (*tensors, *model.buffers()))
