"""Times of a device's work: a GPU's own events, since a launch returns before its work begins."""

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Returns a mark of the moment when the device has done all work that it was given until now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def wait_for(moment: Mark) -> None:
    """Until the device has come as far."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def is_over(moment: Mark) -> bool:
    """Whether the device has come as far; nothing waits."""
    return not isinstance(moment, torch.cuda.Event) or bool(moment.query())  # type: ignore[no-untyped-call]


def seconds_between(started: Mark, ended: Mark) -> float:
    """
    Raises:
        RuntimeError: the device has not come as far as ``ended``; something must have waited for it.
    """
    if isinstance(started, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        milliseconds: float = started.elapsed_time(ended)
        return milliseconds / 1000
    assert isinstance(ended, float)
    return ended - started
