"""Timing of a device's work: by CUDA events on a GPU, whose kernel launches are asynchronous."""

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Returns a mark that the device reaches when it has finished all work submitted so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def wait_for(moment: Mark) -> None:
    """Blocks until the device has reached the mark."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def is_over(moment: Mark) -> bool:
    """Whether the device has reached the mark; does not block."""
    return not isinstance(moment, torch.cuda.Event) or bool(moment.query())  # type: ignore[no-untyped-call]


def seconds_between(started: Mark, ended: Mark) -> float:
    """Returns the seconds between two marks.

    Raises:
        RuntimeError: the device has not reached ``ended`` yet.
    """
    if isinstance(started, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        milliseconds: float = started.elapsed_time(ended)
        return milliseconds / 1000
    assert isinstance(ended, float)
    return ended - started
