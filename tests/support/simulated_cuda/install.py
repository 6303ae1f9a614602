"""Installs simulated GPUs for the duration of a test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers.utils.import_utils
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from tests.support import triton_interpreter
from tests.support.simulated_cuda.collectives import init_group
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.graphs import StreamContext
from tests.support.simulated_cuda.guard import COMPILER, MISSING, load_guard
from tests.support.simulated_cuda.kernels import compiling, interpreted
from tests.support.simulated_cuda.memory import Memory
from tests.support.simulated_cuda.tensor import SimulatedTensor

FUTURE = torch.__future__
MEMORY = 80 * 2**30
PROPERTIES = SimpleNamespace(
    name="simulated H100",
    total_memory=MEMORY,
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=232_448,
)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason=MISSING)


@contextmanager
def simulated_cuda(device_count: int = 2) -> Iterator[SimulatedCuda]:
    """Context in which torch has CUDA devices; everything is restored afterwards.

    A test is skipped on a machine with a GPU, because torch's own guard could not be restored.
    """
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so none is simulated")
    guard = load_guard()
    cuda = SimulatedCuda(guard, device_count, MEMORY)
    with ExitStack() as undo:
        guard.put_in_place(device_count)
        undo.callback(guard.take_away)
        undo.enter_context(patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))  # modes are per thread
        for owner, name, value in _replacements(cuda):
            undo.enter_context(patch.object(owner, name, value, create=True))
        for setting, old in (
            (torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors()),
            (
                FUTURE.set_overwrite_module_params_on_conversion,
                FUTURE.get_overwrite_module_params_on_conversion(),
            ),
        ):
            undo.callback(setting, old)
            setting(True)  # tensors and parameters are moved by operations, which the mode sees
        undo.callback(_forget_what_is_available)
        _forget_what_is_available()
        undo.enter_context(cuda)
        yield cuda


class _Generator(torch.Generator):
    """CPU generator, whatever device is requested."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _counting_floats(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes histc accept integers, as on a GPU; on a CPU it only accepts floating point."""

    def counted(numbers: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return histc(numbers.float(), *given, **named).to(numbers.dtype)

    return counted


def _forget_what_is_available() -> None:
    """Clears transformers' caches of available devices and packages."""
    for function in vars(transformers.utils.import_utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _replacements(cuda: SimulatedCuda) -> Iterator[tuple[Any, str, Any]]:
    """Yields owner, name and replacement of each patched attribute."""
    for name, value in _torch_cuda(cuda).items():
        yield torch.cuda, name, value
    for name, value in _torch_accelerator(cuda).items():
        yield torch.accelerator, name, value
    yield torch._C, "_get_accelerator", lambda: torch.device("cuda")
    yield torch.cuda.graph, "default_capture_stream", None
    yield torch._C, "_host_emptyCache", lambda: None
    yield torch, "Generator", _Generator
    yield torch, "histc", _counting_floats(torch.histc)
    yield torch.distributed, "init_process_group", init_group
    yield torch.Tensor, "pin_memory", lambda tensor: cuda.pin(tensor.clone())
    yield torch.Tensor, "is_pinned", lambda tensor: cuda.is_pinned(tensor)
    yield SimulatedTensor, "of", cuda
    yield SimulatedTensor, "memories", cuda.memories
    yield GridExecutor, "__call__", interpreted(cuda, GridExecutor.__call__)
    yield InterpretedFunction, "run", compiling(cuda, InterpretedFunction.run)
    yield from triton_interpreter.replacements()


def _torch_accelerator(cuda: SimulatedCuda) -> dict[str, Any]:
    return {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: cuda.current.index,
        "device_count": lambda: cuda.device_count,
        "is_available": lambda: True,
        "set_device_index": lambda device: setattr(cuda, "current", cuda.device_of(device)),
    }


def _torch_cuda(cuda: SimulatedCuda) -> dict[str, Any]:
    def set_device(device: Any) -> None:
        cuda.current = cuda.device_of(device)

    def empty_cache() -> None:
        for memory in cuda.memories:
            memory.empty_cache()

    def numbered(device: Any) -> Memory:
        """Returns the memory of a device. Requires an index, as torch's functions for memory fractions do."""
        if device is not None and not isinstance(device, int) and torch.device(device).index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got:{device}")
        return cuda.memory_of(device)

    def set_fraction(fraction: float, device: Any = None) -> None:
        numbered(device).fraction = fraction

    @contextmanager
    def device_context(device: Any) -> Iterator[None]:
        before = cuda.current
        if device is not None:
            set_device(device)
        try:
            yield
        finally:
            cuda.current = before

    return {
        "_lazy_init": lambda: None,
        "CUDAGraph": cuda.Graph,
        "Event": cuda.Event,
        "Stream": cuda.Stream,
        "current_device": lambda: cuda.current.index,
        "current_stream": lambda device=None: cuda.stream,
        "default_stream": lambda device=None: cuda.default_stream,
        "device": device_context,
        "device_count": lambda: cuda.device_count,
        "empty_cache": empty_cache,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "graph_pool_handle": lambda: (0, 1),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: cuda.capturing is not None,
        "is_initialized": lambda: True,
        "get_per_process_memory_fraction": lambda device=None: numbered(device).fraction,
        "mem_get_info": lambda device=None: (cuda.memory_of(device).free, MEMORY),
        "memory_allocated": lambda device=None: cuda.memory_of(device).allocated,
        "memory_reserved": lambda device=None: cuda.memory_of(device).reserved,
        "set_per_process_memory_fraction": set_fraction,
        "set_device": set_device,
        "stream": lambda stream: StreamContext(cuda, stream),
        "synchronize": lambda device=None: cuda.wait("synchronize"),
    }
