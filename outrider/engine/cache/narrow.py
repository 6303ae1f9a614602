"""Narrow types of the cache: keys and values are rounded to 8 bit floats when they are stored.

A stored number depends only on the original number. Every row reads keys and values from the cache, including
its own. So the target computes the same for a token in a prompt, in a Draft, after a rollback and with a
shared prefix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.settings import ModelSettings

NARROW = torch.float8_e4m3fn
LARGEST = torch.finfo(NARROW).max
_NUMBERS = torch.arange(256, dtype=torch.uint8).view(NARROW).float()  # numbers by their codes


class Scales(NamedTuple):
    """Powers of two by which keys and values of a layer are divided before a narrow cache stores them."""

    keys: float = 1.0
    values: float = 1.0


def type_of_cache(settings: ModelSettings, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of cached keys and values. dtype: type of the model."""
    found: torch.dtype = dtype if settings.cache_dtype == "auto" else getattr(torch, settings.cache_dtype)
    return found


def narrowed(numbers: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Returns the numbers as a cache of this type stores them.

    Numbers outside the narrow type's range are clamped to it; numbers that are not finite become NaN.

    scale: divisor of the numbers, if the type is narrow.
    """
    if dtype != NARROW:
        return numbers
    numbers = numbers / scale
    return (numbers.clamp(-LARGEST, LARGEST) + (numbers - numbers)).to(NARROW)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cached numbers in the model's type, exactly."""
    if stored.dtype != NARROW:
        return stored
    if stored.device.type != "cpu":
        return stored.to(dtype)
    # A lookup is several times as fast as torch's conversion.
    codes = codes_of(stored).flatten().int()
    return _NUMBERS.to(dtype).index_select(0, codes).view(stored.shape)


def codes_of(stored: Tensor) -> Tensor:
    """Returns the numbers of a narrow cache as their codes, uint8, and any other numbers as they are."""
    return stored.view(torch.uint8) if stored.dtype == NARROW else stored
