"""Triton kernels on the simulated device, which run in Triton's interpreter."""

from collections.abc import Callable, Mapping, Sequence
from inspect import get_annotations
from typing import Any

import torch
import triton.language as tl

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.tensor import SimulatedTensor, numbers_of


def launch(cuda: SimulatedCuda, name: str, kernel: Callable[[], None]) -> None:
    """Launches a kernel that writes its results to given memory."""
    cuda.launched(name)
    if cuda.capturing is not None:
        cuda.capturing.record(kernel)
    kernel()


Specialized = tuple[tuple[str, object], ...]  # properties of arguments for which a kernel is compiled


def specialized(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Specialized:
    """Returns what Triton specializes on: types, alignment, integers of 1 or 16 n, constants."""
    given = dict(zip(function.arg_names, args, strict=False)) | dict(kwargs)
    constants = {name for name, kind in get_annotations(function.fn).items() if kind is tl.constexpr}
    plain = function.kwargs["do_not_specialize"] or ()

    def of(name: str, value: Any) -> object:
        if name in constants or name not in function.arg_names or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int) and name not in plain:
            return "int", value == 1, value % 16 == 0
        return type(value)

    return tuple((name, of(name, value)) for name, value in sorted(given.items()))


def compiling(cuda: SimulatedCuda, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of Triton's interpreter to record the specializations of kernels.

    run: InterpretedFunction.run.
    """

    def compile_and_run(function: Any, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        cuda.compiled.add((function.__name__, specialized(function, args, options)))
        return run(function, *args, **kwargs)

    return compile_and_run


def interpreted(cuda: SimulatedCuda, run: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method of Triton's interpreter to launch kernels on simulated or other tensors.

    run: GridExecutor.__call__.
    """

    def launch_kernel(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)]
        if not ours:
            run(executor, *args, **kwargs)
            return
        if len(ours) < len(tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        if any(tensor.device != cuda.current for tensor in ours):
            raise torch.AcceleratorError(
                f"CUDA error: an illegal memory access was encountered (the current device is {cuda.current})"
            )
        arguments = [numbers_of(value) for value in args]
        options = {name: numbers_of(value) for name, value in kwargs.items()}
        launch(cuda, executor.fn.__name__, lambda: run(executor, *arguments, **options))

    return launch_kernel
