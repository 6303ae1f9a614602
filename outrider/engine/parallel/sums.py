"""Sums over the ranks of a group: fast, or added in one order wherever a row lies."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # takes this rank's part, gives all ranks the sum


def add_up(part: Tensor) -> Tensor:
    """Returns the sum over all ranks, which takes the memory of ``part``.

    The order of the ranks differs from one piece of the tensor to the next: a ring adds each piece beginning
    at another rank. Of three ranks or more, equal rows may so get unequal sums.
    """
    dist.all_reduce(part)
    return part


def add_up_in_order(part: Tensor) -> Tensor:
    """Returns the sum over all ranks, added in float32 from rank 0 to the last, and rounded once.

    A row's sum follows from its parts alone: the batch-invariant form. It sends more than ``add_up`` does,
    which counts little for the few rows of such a pass.
    """
    size = dist.get_world_size()
    parts = part.new_empty(size * len(part), *part.shape[1:])
    dist.all_gather_single(parts, part.contiguous())
    first, *others = parts.chunk(size)
    total = first.float()
    for other in others:
        total += other
    return total.to(part.dtype)
