"""Named fields of a step in a buffer of bytes, which is copied to the device, or to the host, at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

ITEM_SIZES = {"int64": 8, "float64": 8, "int32": 4, "float32": 4, "bool": 1}  # bytes
ALIGNMENT = 16  # bytes; kernels would be compiled again for pointers of another alignment


class Field(Struct, frozen=True):
    """Shape and dtype of a field."""

    shape: tuple[int, ...]
    dtype: str = "int64"  # name that numpy and torch share

    @property
    def size(self) -> int:
        """Bytes of the field."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class StepBuffer:
    """Input of a step on the host. ``arrays`` are its fields, to be filled before it is sent."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        """device: device to which the buffer is copied. For a GPU the buffer's memory is pinned."""
        self._device = device
        self._places, self.size = _placed(tuple(fields.items()), ALIGNMENT)  # bytes
        self._host = torch.empty(self.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes: NDArray[np.uint8] = self._host.numpy()
        self.arrays: dict[str, NDArray[Any]] = _views(self._places, self._bytes)

    def clear_before(self, name: str) -> None:
        """Fills the fields before a field with zeros."""
        self._bytes[: self._places[name].start] = 0

    def sent(self) -> dict[str, Tensor]:
        """Copies the buffer to new memory of the device, without waiting; returns the fields there."""
        return self.at(self._host.to(self._device, non_blocking=True))

    def send_to(self, memory: Tensor) -> None:
        """Copies the buffer to the beginning of ``memory``, uint8 on the device, without waiting."""
        memory[: self.size].copy_(self._host, non_blocking=True)

    def at(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the fields of a copy that lies at the beginning of ``memory``, uint8."""
        return _views(self._places, memory[: self.size])


def buffer_size(fields: Mapping[str, Field]) -> int:
    """Returns the bytes of a buffer with these fields."""
    return _placed(tuple(fields.items()), ALIGNMENT)[1]


def split(fields: Mapping[str, Field], buffer: Any, alignment: int = ALIGNMENT) -> dict[str, Any]:
    """Returns views of the fields in a buffer, a numpy array or a tensor, uint8 [num_bytes].

    alignment: bytes; the place of each field is a multiple of it, and of the size of the field's numbers.
    """
    places, _ = _placed(tuple(fields.items()), alignment)
    return _views(places, buffer)


@dataclass(frozen=True)
class _Place:
    """Place of a field in its buffer."""

    dtype: str
    start: int  # bytes before it
    numbers: slice  # range of the field in the buffer, in numbers of the dtype
    shape: tuple[int, ...] | None  # None: it has a single dimension


@lru_cache(maxsize=1024)  # steps repeat their layouts
def _placed(fields: tuple[tuple[str, Field], ...], alignment: int) -> tuple[Mapping[str, _Place], int]:
    """Returns the places of fields that follow one another, by name, and the bytes of their buffer."""
    places, start = dict[str, _Place](), 0
    for name, field in fields:
        size, item = field.size, ITEM_SIZES[field.dtype]
        numbers = slice(start // item, (start + size) // item)
        places[name] = _Place(field.dtype, start, numbers, None if len(field.shape) == 1 else field.shape)
        start += -(-size // alignment) * alignment
    return places, start


def _views(places: Mapping[str, _Place], buffer: Any) -> dict[str, Any]:
    """Returns views of the fields at these places. buffer: argument of ``split``."""
    is_on_host, length = isinstance(buffer, np.ndarray), len(buffer)
    of_type = {  # the buffer as numbers of each type, without a remainder at its end
        dtype: buffer[: length - length % ITEM_SIZES[dtype]].view(
            dtype if is_on_host else getattr(torch, dtype)
        )
        for dtype in {place.dtype for place in places.values()}
    }
    return {
        name: of_type[place.dtype][place.numbers]
        if place.shape is None
        else of_type[place.dtype][place.numbers].reshape(place.shape)
        for name, place in places.items()
    }
