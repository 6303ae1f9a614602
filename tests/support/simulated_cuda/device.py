"""The simulated device: operations on its tensors are checked, counted and computed on the CPU."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda.collectives import COLLECTIVES
from tests.support.simulated_cuda.counts import cause
from tests.support.simulated_cuda.graphs import Event, Graph, Stream
from tests.support.simulated_cuda.memory import Memory
from tests.support.simulated_cuda.tensor import SimulatedTensor, mapped, numbers_of, tensors_in
from tests.support.simulated_cuda.transfers import Transfers

aten = torch.ops.aten
Rule = Callable[..., Any]  # takes the device, the operation, its arguments and its keyword arguments

# Operations whose result depends on values on the device: they need a copy to the host and a wait.
ASKS = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
# Operations that only allocate memory or make views.
NO_LAUNCH = {
    aten._unsafe_view.default,
    aten.detach_.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Composite operations for which the library has a single kernel.
WHOLE = {aten.scaled_dot_product_attention.default}


class SimulatedCuda(Transfers, TorchDispatchMode):
    """Simulated CUDA devices. While the mode is active, ``device="cuda"`` works: see install.py."""

    def __init__(self, guard: ctypes.CDLL, device_count: int, memory: int) -> None:
        """memory: bytes of each device."""
        TorchDispatchMode.__init__(self)
        Transfers.__init__(self)
        self.device_count = device_count
        self.memories = [Memory(memory) for _ in range(device_count)]
        self.rules: dict[Any, Rule] = {}  # special implementations by operation
        self.compiled: set[tuple[str, object]] = set()  # Triton kernels with their specializations
        self._guard = guard
        self.Stream = type("Stream", (Stream,), {"cuda": self})
        self.Event = type("Event", (Event,), {"cuda": self})
        self.Graph = type("CUDAGraph", (Graph,), {"cuda": self})
        self.default_stream = self.stream = self.Stream()

    @property
    def current(self) -> torch.device:
        """Device to which "cuda" refers."""
        return torch.device("cuda", self._guard.current_device())

    @current.setter
    def current(self, device: torch.device) -> None:
        self._guard.set_device(device.index)

    def memory_of(self, device: Any = None) -> Memory:
        """Returns the memory of a device. device: name or number; None: the current device."""
        return self.memories[self.device_of("cuda" if device is None else device).index]

    def device_of(self, name: Any) -> torch.device:
        """Returns the device with its index. Raises RuntimeError if there is none."""
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
        if device.type != "cuda":
            return device
        index = self.current.index if device.index is None else device.index
        if index >= self.device_count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = _simulated(args, kwargs)
        by_place = next(
            (arg for arg in args if isinstance(arg, torch.device)), None
        )  # as aten.to.device has it
        named = kwargs.get("device", by_place)
        wanted = self.device_of(named) if named is not None else None
        if not ours and (wanted is None or wanted.type != "cuda"):
            return self._on_host(func, args, kwargs)
        rule = self.rules.get(func) or _RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self.compute(func, args, kwargs, wanted)

    def compute(self, func: Any, args: Any, kwargs: Any, wanted: torch.device | None = None) -> Any:
        """Runs an operation on the CPU numbers. wanted: device of its results, if an argument names it."""
        self.check_devices(func, args, kwargs)
        ours = _simulated(args, kwargs)
        device = wanted or ours[0].device
        if device.type != "cuda":
            return func(
                *mapped(numbers_of, args), **{name: numbers_of(value) for name, value in kwargs.items()}
            )
        if self.capturing is not None and device != self.stream.device:
            self.must_not_capture(f"{func} on {device}")
        if func in ASKS:
            self.counts.copies_out[cause(func)] += 1
            self.wait(func)
        elif func not in NO_LAUNCH and not is_view(func):
            self.launched(func)
        arguments, options = (
            mapped(numbers_of, args),
            {name: numbers_of(value) for name, value in kwargs.items()},
        )
        if wanted is not None:
            options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)
        results = func(*arguments, **options)
        if self.capturing is not None and not is_view(func):
            self.capturing.record(lambda: _write(results, func(*arguments, **options)))
        with torch.inference_mode(is_inference(func, ours)):
            return self._wrapped(results, ours, device)

    def check_devices(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError if tensors are on different devices. CPU scalars are allowed."""
        tensors = tensors_in((args, *kwargs.values()))
        found = {str(tensor.device) for tensor in tensors if tensor.device.type == "cuda" or tensor.dim()}
        if len(found) > 1:
            names = " and ".join(sorted(found))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {names}: {func}")

    def _wrapped(self, results: Any, ours: list[SimulatedTensor], device: torch.device) -> Any:
        """Wraps results as tensors on the device; for in-place operations returns the given tensors."""
        given = {id(tensor.numbers): tensor for tensor in ours}

        def wrap(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            known = given.get(id(result))
            if known is None:
                return SimulatedTensor(result, device)
            if known.shape != result.shape or known.stride() != result.stride():
                raise NotImplementedError("the simulated GPU cannot change a tensor's shape in place")
            return known

        return mapped(wrap, results)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            self.must_not_capture(func)  # the host would wait for the other ranks, but a replay would not
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self.pin(func(*args, **{**kwargs, "pin_memory": None}))


def _simulated(args: Any, kwargs: Any) -> list[SimulatedTensor]:
    return [tensor for tensor in tensors_in((args, *kwargs.values())) if isinstance(tensor, SimulatedTensor)]


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is composed of other operations on every device."""
    return func not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


@cache
def is_view(func: Any) -> bool:
    """Whether the results of an operation are views of its arguments."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns
    )


def is_inference(func: Any, ours: list[SimulatedTensor]) -> bool:
    """Whether results are inference tensors. A view of a tensor is one if the tensor is one."""
    return ours[0].is_inference() if is_view(func) else torch.is_inference_mode_enabled()


def _write(kept: Any, anew: Any) -> None:
    """Copies new results into the memory of the old results."""
    for old, new in zip(tensors_in(kept), tensors_in(anew), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _copied(cuda: SimulatedCuda, func: Any, args: Any, kwargs: Any) -> Any:
    """Converts a tensor to another dtype or device."""
    (source,) = args
    options = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
    device = source.device if kwargs.get("device") is None else cuda.device_of(kwargs["device"])
    non_blocking = bool(kwargs.get("non_blocking"))
    if device == source.device:
        return cuda.compute(func, args, options)
    if isinstance(source, SimulatedTensor) and device.type == "cuda":
        raise NotImplementedError("the simulated GPU does not copy to another one")
    if isinstance(source, SimulatedTensor):
        target = torch.empty_like(source.numbers, dtype=kwargs.get("dtype"))
        if non_blocking:
            cuda.pin(target)
        cuda.copy_out(source.numbers, target, func, non_blocking=non_blocking)
        return target
    made = SimulatedTensor(torch.empty_like(source, **options), device)
    _copied_to(cuda, func, (made, source, non_blocking), {})
    return made


def _copied_to(cuda: SimulatedCuda, func: Any, args: Any, kwargs: Any) -> Any:
    """Copies between two tensors, of which at least one is on the device."""
    target, source, *rest = args
    non_blocking = bool(rest[0] if rest else kwargs.get("non_blocking"))
    if isinstance(target, SimulatedTensor) and isinstance(source, SimulatedTensor):
        return cuda.compute(aten.copy_.default, (target, source), {})
    if isinstance(source, SimulatedTensor):
        cuda.copy_out(source.numbers.expand_as(target), target, func, non_blocking=non_blocking)
        return target
    cuda.copy_in(source, target.numbers, func, non_blocking=non_blocking)
    return target


def _indexed(cuda: SimulatedCuda, func: Any, args: Any, kwargs: Any) -> Any:
    """Reads or writes by indices. CPU indices are copied to the device, and masks are turned into indices."""
    target, indices, *rest = args
    given = [index for index in indices if index is not None]
    if not isinstance(target, SimulatedTensor):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    is_number = bool(rest) and not isinstance(rest[0], SimulatedTensor) and not rest[0].dim()
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    if is_number and len(masks) == len(given):
        return cuda.compute(func, args, kwargs)  # torch uses masked_fill, which needs no indices
    there = {"device": target.device}
    moved = [
        index if index is None or isinstance(index, SimulatedTensor) else _copied(cuda, func, (index,), there)
        for index in indices
    ]
    if is_number:
        rest[0] = _copied(cuda, func, (rest[0],), there)
    for _ in masks:
        cuda.launched(aten.nonzero.default)
        cuda.counts.copies_out[cause(aten.nonzero.default)] += 1
        cuda.wait(aten.nonzero.default)
    return cuda.compute(func, (target, moved, *rest), kwargs)


_RULES: dict[Any, Rule] = {
    **COLLECTIVES,
    aten._to_copy.default: _copied,
    aten.copy_.default: _copied_to,
    aten.index.Tensor: _indexed,
    aten.index_put.default: _indexed,
    aten.index_put_.default: _indexed,
    aten._index_put_impl_.default: _indexed,
}
