"""Bytes that a loaded model and its cache really take."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.forward.linear import PackedLinear
from outrider.engine.loading.quantized import Int4Linear, Int8Linear


def allocated_weights(model: nn.Module) -> int:
    """Of every weight and buffer, packed ones as oneDNN says."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, PackedLinear | Int8Linear | Int4Linear):
            tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return sum(_bytes(tensor) for tensor in tensors)


def _bytes(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        return tensor.to_local().untyped_storage().nbytes()
    if tensor._base is not None:
        return 0  # a view of another
    return tensor.nbytes if tensor.layout == torch.strided else torch.ops.mkldnn._nbytes(tensor)


def allocated_cache(cache: PagedCache) -> int:
    return sum(tensor.nbytes for tensor in (*cache.keys.values(), *cache.values.values()))
