"""Narrow types of the cache: keys and values of the model's type, rounded to 8 bit floats as they are stored.

A stored number depends on nothing but the number itself. Whoever attends reads it from the cache, the row
that has stored it included. So what the target says of a token is the same in a prompt, in a Draft, after a
rollback and from a shared prefix.
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

    Beyond the narrow type's range they become its largest number, and NaN if they are not finite.

    scale: number that they are divided by, if the type is narrow.
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
    # torch converts them several times as slowly.
    codes = codes_of(stored).flatten().int()
    return _NUMBERS.to(dtype).index_select(0, codes).view(stored.shape)


def codes_of(stored: Tensor) -> Tensor:
    """Returns the numbers of a narrow cache as their codes, uint8, and any other numbers as they are."""
    return stored.view(torch.uint8) if stored.dtype == NARROW else stored
