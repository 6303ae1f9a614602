"""Times of the parts of a load."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

Phase = Literal["weights", "self_check", "cache", "graphs"]


@dataclass
class LoadTimings:
    """Seconds by phase, in order; 0 for a phase that was left out."""

    weights: float = 0.0
    self_check: float = 0.0
    cache: float = 0.0
    graphs: float = 0.0

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        started = time.perf_counter()
        yield
        setattr(self, phase, getattr(self, phase) + time.perf_counter() - started)

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in asdict(self).items())
