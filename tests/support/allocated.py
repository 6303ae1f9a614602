"""Actual memory of a loaded model, its cache and its graphs, in bytes."""

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.forward.graphs import CapturedSizes
from outrider.engine.forward.linear import PackedLinear, StoredLinear
from outrider.engine.loading.quantized import Int4Linear, Int8Linear
from outrider.engine.loop.step_graphs import StepGraphs


def allocated_weights(model: nn.Module) -> int:
    """Returns the bytes of all weights and buffers. Shared tensors count once; packed sizes are oneDNN's."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, PackedLinear | Int8Linear | Int4Linear):
            kept = vars(module) if isinstance(module, Int4Linear) else vars(module.multiply)
            tensors += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    stored = [module for module in model.modules() if isinstance(module, StoredLinear)]
    tensors += [module.bias for module in stored if module.bias is not None]
    whole = [tensor for tensor in tensors if tensor._base is None]  # the other tensors are views of these
    packed = [torch.ops.mkldnn._nbytes(tensor) for tensor in whole if tensor.layout != torch.strided]
    plain = [_local(tensor) for tensor in whole if tensor.layout == torch.strided]
    unpacked = sum({tensor.data_ptr(): tensor.nbytes for tensor in plain}.values())
    return unpacked + sum(packed) + sum(module.weight.num_bytes for module in stored)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def allocated_cache(cache: PagedCache) -> int:
    tensors = [*cache.keys.values(), *cache.values.values()]
    if cache.states is not None:
        for layer in cache.states.layers.values():
            tensors += [layer.states, layer.tails, layer.records, layer.kept_states, layer.kept_tails]
    return sum(tensor.nbytes for tensor in tensors)


def kept_by_graphs(*owners: object) -> int:
    """Returns the bytes of inputs and outputs of the graphs of forward passes or drafters.

    Block tables do not count: they exist without graphs too.
    """
    kept = [
        tensor.untyped_storage()
        for owner in owners
        for graphs in _tree(vars(owner))
        if isinstance(graphs, CapturedSizes)
        for tensor in _tree(vars(graphs))
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


def _tree(values: Any) -> list[object]:
    """Returns the leaves of an object's attributes, of nested containers and of dataclasses."""
    found: list[object] = []
    named = values.items() if isinstance(values, dict) else (("", value) for value in values)
    for value in (value for name, value in named if name != "block_tables"):
        if is_dataclass(value) or isinstance(value, StepGraphs):
            found += _tree(vars(value))
        elif isinstance(value, dict | list | tuple):
            found += _tree(value)
        else:
            found.append(value)
    return found
