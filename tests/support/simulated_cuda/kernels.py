"""Triton's kernels on the simulated device: they run in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.tensor import SimulatedTensor, numbers_of


def launch(cuda: SimulatedCuda, name: str, kernel: Callable[[], None]) -> None:
    """One kernel, which writes its results to memory that it was given."""
    cuda.launched(name)
    if cuda.capturing is not None:
        cuda.capturing.record(kernel)
    kernel()


def interpreted(cuda: SimulatedCuda, run: Callable[..., None]) -> Callable[..., None]:
    """Of Triton's interpreter: a launch of a kernel, with simulated tensors or with others.

    run: GridExecutor.__call__
    """

    def launch_kernel(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        ours = [one for one in tensors if isinstance(one, SimulatedTensor)]
        if not ours:
            run(executor, *args, **kwargs)
            return
        if len(ours) < len(tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        if any(one.device != cuda.current for one in ours):
            raise torch.AcceleratorError(
                f"CUDA error: an illegal memory access was encountered (the current device is {cuda.current})"
            )
        arguments = [numbers_of(one) for one in args]
        options = {name: numbers_of(one) for name, one in kwargs.items()}
        launch(cuda, executor.fn.__name__, lambda: run(executor, *arguments, **options))

    return launch_kernel
