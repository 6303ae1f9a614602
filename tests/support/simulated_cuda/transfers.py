"""Copies between host and simulated device, and waiting for them."""

from dataclasses import dataclass

import torch

from tests.support.simulated_cuda.counts import Counts, cause
from tests.support.simulated_cuda.graphs import NOT_PERMITTED, Graph, Stream


@dataclass(frozen=True)
class _Arriving:
    """Copy to the host whose end was not waited for yet."""

    number: int  # order in which copies began
    target: torch.Tensor
    numbers: torch.Tensor


@dataclass(frozen=True)
class _Leaving:
    """Copy to the device that may still read its source."""

    number: int
    source: torch.Tensor
    numbers: torch.Tensor  # values when the copy began
    cause: str


class Transfers:
    """Counts launches, copies and waits.

    A non-blocking copy to the host arrives only at the next wait. The source of a non-blocking copy to the
    device must not change before the next wait. So race conditions between host and device become visible.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.capturing: Graph | None = None
        self.default_stream: Stream
        self.stream: Stream
        self.kernels_run = 0
        self.issued = self.done = 0  # newest numbers of copies and events
        self._arriving: list[_Arriving] = []
        self._leaving: list[_Leaving] = []
        self._pinned: dict[int, torch.Tensor] = {}  # key: address; held so that it is not reused

    def launched(self, operation: object) -> None:
        self.counts.launches[cause(operation)] += 1
        self.kernels_run += 1

    def begin(self) -> int:
        """Returns the number of a new copy or event, in the order of the stream."""
        self.issued += 1
        return self.issued

    def must_not_capture(self, operation: object) -> None:
        """Raises AcceleratorError during the capture of a graph, and invalidates the graph."""
        if self.capturing is not None:
            self.capturing.is_invalid = True
            raise torch.AcceleratorError(f"{NOT_PERMITTED}: {cause(operation)}")

    def wait(self, operation: object, issued: int | None = None) -> None:
        """Waits for all launched work, or for the first ``issued`` copies and events."""
        self.must_not_capture(operation)
        self.counts.waits[cause(operation)] += 1
        if issued is not None and issued < self.issued:
            self.counts.busy_waits[cause(operation)] += 1
        self.deliver(issued)

    def deliver(self, issued: int | None = None) -> None:
        """Completes all issued work, or the first ``issued`` copies and events."""
        newest = self.issued if issued is None else issued
        self.done = max(self.done, newest)
        leaving = [copy for copy in self._leaving if copy.number <= newest]
        arriving = [copy for copy in self._arriving if copy.number <= newest]
        self._leaving = [copy for copy in self._leaving if copy.number > newest]
        self._arriving = [copy for copy in self._arriving if copy.number > newest]
        with torch.inference_mode():
            for out in arriving:
                out.target.copy_(out.numbers)
        for copy in leaving:
            if not torch.isclose(copy.source, copy.numbers, rtol=0.0, atol=0.0, equal_nan=True).all():
                raise RuntimeError(f"pinned memory changed while it was still copied from: {copy.cause}")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a CPU tensor's memory as pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def copy_in(
        self, source: torch.Tensor, target: torch.Tensor, operation: object, *, non_blocking: bool
    ) -> None:
        """Copies a CPU tensor into a tensor on the device."""
        if self.capturing is None:
            self.counts.bytes_in += source.nbytes
        if not self.is_pinned(source):
            self.must_not_capture(operation)
            self.counts.pageable_copies[cause(operation)] += 1
        elif self.capturing is not None:
            self.capturing.record(lambda: self.copy_in(source, target, operation, non_blocking=True))
        else:
            self.counts.pinned_copies[cause(operation)] += 1
        if not non_blocking:
            self.wait(operation)
        elif self.is_pinned(source) and self.capturing is None:
            self._leaving.append(_Leaving(self.begin(), source, source.clone(), cause(operation)))
        target.copy_(source)

    def copy_out(
        self, source: torch.Tensor, target: torch.Tensor, operation: object, *, non_blocking: bool
    ) -> None:
        """Copies a tensor on the device into a CPU tensor."""
        if self.capturing is not None and non_blocking and self.is_pinned(target):
            self.capturing.record(lambda: self.copy_out(source, target, operation, non_blocking=True))
            return
        if non_blocking and self.is_pinned(target):
            numbers = source.to(target.dtype, copy=True)
            self._arriving.append(_Arriving(self.begin(), target, numbers))
        else:
            self.wait(operation)
            target.copy_(source)
        self.counts.copies_out[cause(operation)] += 1
