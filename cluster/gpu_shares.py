"""Shares of GPUs for workers whose settings leave them open."""

import math

RAYS_GRAINS = 10_000  # units of one GPU; Ray counts fractions of a resource in these units
ROUNDING = 1e-6  # units; tolerance for the rounding of floats


def equal_share(replicas: int, gpus: float) -> float:
    """Returns the largest equal share of a GPU with which all replicas fit; 0.0 without GPUs."""
    return 1.0 / math.ceil(replicas / gpus) if replicas and gpus >= 1 else 0.0


def share_left(processes: int, of_each: float, drafts: int, gpus: float) -> float:
    """Returns the share of a GPU for each draft, next to the target's processes; 0.0: no share is left.

    Args:
        processes: ranks of all replicas.
        of_each: share of a GPU for each process, at most 1.
        drafts: replicas of all drafts.
        gpus: GPUs of the cluster.
    """
    if not drafts or not of_each:
        return equal_share(drafts, gpus)
    together = math.floor(1 / of_each)  # processes on one GPU
    taken = math.ceil(processes / together)
    if gpus - taken >= 1:
        return equal_share(drafts, gpus - taken)
    if taken > gpus:
        return 0.0
    on_last = processes - (taken - 1) * together
    next_to_each = (1 - min(together, processes) * of_each) / math.ceil(drafts / taken)
    part = max(next_to_each, (1 - on_last * of_each) / drafts)
    return math.floor(part * RAYS_GRAINS + ROUNDING) / RAYS_GRAINS
