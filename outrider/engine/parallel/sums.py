"""Sums over the ranks of a group: fast, or in an order that does not depend on a row's place."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # takes this rank's part, returns the sum at all ranks


def add_up(part: Tensor) -> Tensor:
    """Returns the sum over all ranks, in the memory of ``part``.

    The order of the ranks differs between pieces of the tensor: a ring starts each piece at another rank.
    With three ranks or more equal rows may get unequal sums.
    """
    dist.all_reduce(part)
    return part


def add_up_in_order(part: Tensor) -> Tensor:
    """Returns the sum over all ranks, added in float32 from rank 0 to the last, and rounded once.

    A row's sum depends on its parts alone: this is the batch-invariant form. It sends more than ``add_up``,
    which costs little for the few rows of such a pass.
    """
    size = dist.get_world_size()
    parts = part.new_empty(size * len(part), *part.shape[1:])
    dist.all_gather_single(parts, part.contiguous())
    first, *others = parts.chunk(size)
    total = first.float()
    for other in others:
        total += other
    return total.to(part.dtype)
