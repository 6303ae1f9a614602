"""The sampling settings of rows on their way to the device: one copy that nothing waits for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.decoding.row import Row
from outrider.decoding.settings import Sampling
from outrider.engine.kernels.verdict import DraftRows

_LARGEST_TOP_K = 2**31 - 1
_INFINITY = tl.constexpr(math.inf)


@dataclass(frozen=True)
class PackedRows:
    """What the kernels know of each row."""

    integers: Tensor  # int64 [4, num_rows] noise key, position, top_k, whether there is noise
    numbers: Tensor  # float64 [3, num_rows] temperature, top_p, the logarithm of min_p
    drafts: Tensor  # int64 [2, num_rows] DraftRows.numbers, [0, num_rows] where nothing was drafted
    are_truncated: bool  # any of them


def pack_settings(rows: Sequence[Row], device: torch.device, drafts: DraftRows | None = None) -> PackedRows:
    """In one copy."""
    settings: dict[int, tuple[int, bool, float, float, float]] = {}
    for row in rows:
        if id(row.sampling) not in settings:
            settings[id(row.sampling)] = _settings(row.sampling)
    # What begins after an even number of rows is aligned to 16 bytes: for others kernels compile anew.
    first = 0 if drafts is None else 2
    packed = torch.empty(first + 7, len(rows), dtype=torch.int64, pin_memory=device.type == "cuda")
    of_drafts, words = np.split(packed.numpy(), [first])
    if drafts is not None:
        of_drafts[:] = drafts.numbers
    words[0].view(np.uint64)[:] = np.fromiter((row.noise_key for row in rows), np.uint64)
    words[1] = [row.position for row in rows]
    words[2:4].T[:] = [settings[id(row.sampling)][:2] for row in rows]
    words[4:].view(np.float64).T[:] = [settings[id(row.sampling)][2:] for row in rows]
    are_truncated = any(one[0] > 0 or one[3] < 1.0 or one[4] > -math.inf for one in settings.values())
    there, of_rows = packed.to(device, non_blocking=True).split([first, 7])
    return PackedRows(of_rows[:4], of_rows[4:].view(torch.float64), there, are_truncated)


def _settings(sampling: Sampling) -> tuple[int, bool, float, float, float]:
    """As in pack_settings. To a rule that looks at distributions temperature 0 means the likeliest token."""
    if sampling.temperature == 0.0:
        return int(sampling.verification != "coupled"), False, 1.0, 1.0, -math.inf
    distance = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    return min(sampling.top_k, _LARGEST_TOP_K), True, sampling.temperature, sampling.top_p, distance


@triton.jit
def load_settings(integers, numbers, num_rows, row):
    """top_k, temperature, top_p, and how far below the largest logit min_p cuts off."""
    top_k = tl.load(integers + 2 * num_rows + row)
    temperature = tl.load(numbers + row).to(tl.float32)
    top_p = tl.load(numbers + num_rows + row)
    return top_k, temperature, top_p, tl.load(numbers + 2 * num_rows + row).to(tl.float32)


@triton.jit
def is_truncated(top_k, top_p, distance):
    return (top_k > 0) | (top_p < 1.0) | (distance > -_INFINITY)
