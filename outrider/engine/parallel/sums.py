"""Sums over the ranks of a group: fast, or in an order that does not depend on a row's place in the batch."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

Sum = Callable[[Tensor], Tensor]  # takes this rank's part, returns the sum at all ranks


def add_up(part: Tensor) -> Tensor:
    """Returns the sum over all ranks, in the memory of ``part``.

    The order of addition differs between pieces of the tensor, as a ring starts each piece at another rank.
    With three or more ranks, equal rows may get unequal sums.
    """
    dist.all_reduce(part)
    return part


def add_up_in_order(part: Tensor) -> Tensor:
    """Returns the sum over all ranks, added in float32 from rank 0 to the last, and rounded once.

    A row's sum depends on its parts alone: this is the batch-invariant form. It sends more than ``add_up``,
    which costs little for the few rows of such a pass.
    """
    return summed(gathered(part))


def gathered(part: Tensor) -> Tensor:
    """Returns the parts of all ranks in their order, [ranks, *shape of part]."""
    parts = part.new_empty(dist.get_world_size(), *part.shape)
    dist.all_gather_single(parts.view(-1, *part.shape[1:]), part.contiguous())
    return parts


def summed(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension, added in float32 in its order, and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
