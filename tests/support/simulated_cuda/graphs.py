"""Streams, events and CUDA graphs of a simulated device. All streams share one order of work."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.simulated_cuda.device import SimulatedCuda

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
KERNEL_MS = 1e-6  # device time of each kernel, also in a graph
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Stream:
    """Replaces torch.cuda.Stream."""

    cuda: "SimulatedCuda"  # set by a subclass

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = self.cuda.device_of("cuda" if device is None else device)

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self.cuda.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.wait("stream.synchronize")

    def query(self) -> bool:
        self.cuda.must_not_capture("stream.query")
        self.cuda.deliver()
        return True


class Event:
    """Replaces torch.cuda.Event."""

    cuda: "SimulatedCuda"  # set by a subclass

    def __init__(self, enable_timing: bool = False, **options: object) -> None:
        self._is_timed = enable_timing
        self._recorded = 0
        self._launches = 0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = self.cuda.begin()
        self._launches = self.cuda.kernels_run

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        self.cuda.wait("event.synchronize", self._recorded)

    def query(self) -> bool:
        self.cuda.must_not_capture("event.query")
        self.cuda.deliver(self._recorded)
        return True

    def elapsed_time(self, end: "Event") -> float:
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded and end._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self._recorded, end._recorded) > self.cuda.done:
            raise torch.AcceleratorError("CUDA error: device not ready")
        return (end._launches - self._launches) * KERNEL_MS


class Graph:
    """Replaces torch.cuda.CUDAGraph: holds the work that was launched during its capture."""

    cuda: "SimulatedCuda"  # set by a subclass

    def __init__(self, keep_graph: bool = False) -> None:
        self._work: list[Callable[[], Any]] = []
        self._is_captured = False
        self.is_invalid = False

    def record(self, work: Callable[[], Any]) -> None:
        self._work.append(work)

    def capture_begin(self, pool: object = None, **options: object) -> None:
        if self.cuda.stream is self.cuda.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self.cuda.capturing is not None:
            raise RuntimeError("another graph is being captured")
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None
        if self.is_invalid:
            raise torch.AcceleratorError(INVALIDATED)
        self._is_captured = True

    def replay(self) -> None:
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.cuda.must_not_capture("graph.replay")
        self.cuda.launched("graph.replay")
        with torch.inference_mode():  # so that work may write to inference tensors too
            for work in self._work:
                self.cuda.kernels_run += 1
                work()

    def reset(self) -> None:
        self._work = []
        self._is_captured = False

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class StreamContext:
    """Replaces the context of torch.cuda.stream: its exit restores the previous stream and device."""

    def __init__(self, cuda: "SimulatedCuda", stream: Stream | None) -> None:
        self._cuda = cuda
        self._stream = stream

    def __enter__(self) -> None:
        self._before, self._device = self._cuda.stream, self._cuda.current
        if self._stream is not None:
            self._cuda.stream = self._stream
            self._cuda.current = self._stream.device

    def __exit__(self, *raised: object) -> None:
        self._cuda.stream = self._before
        self._cuda.current = self._device
