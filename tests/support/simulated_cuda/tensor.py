"""Tensor that claims to be on a CUDA device, while its numbers are in a CPU tensor."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda.memory import Memory


class SimulatedTensor(torch.Tensor):
    """Tensor of a SimulatedCuda, which alone can compute with it."""

    numbers: torch.Tensor
    of: ClassVar[TorchDispatchMode | None] = None  # the active SimulatedCuda
    memories: ClassVar[Sequence[Memory]] = ()  # memories of its devices

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, device: torch.device) -> "SimulatedTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        made.numbers = numbers
        if device.type == "cuda" and cls.memories:
            cls.memories[device.index].hold(made, numbers)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if cls.of is None:
            raise RuntimeError(f"{func}: the simulated GPU of this tensor is no more")
        with cls.of:
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.numbers!r}, device={str(self.device)!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()


def numbers_of(value: Any) -> Any:
    """Returns the CPU tensor of a simulated tensor; other values are returned unchanged."""
    return value.numbers if isinstance(value, SimulatedTensor) else value


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in an operation's arguments or results, also in nested lists."""
    found = []
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to a value, or to each value in nested lists."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, item) for item in value)
    return change(value)
