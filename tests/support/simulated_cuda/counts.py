"""Costs of work on a simulated GPU, by the lines of our code that cause it."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass
class Counts:
    """Numbers of launches, copies and waits, by the line and the operation that caused them."""

    launches: Counter[str] = field(default_factory=Counter)  # kernels; a replayed graph is one launch
    pinned_copies: Counter[str] = field(default_factory=Counter)  # copies to the device from pinned memory
    pageable_copies: Counter[str] = field(default_factory=Counter)  # copies to the device from other memory
    copies_out: Counter[str] = field(default_factory=Counter)  # copies from the device
    waits: Counter[str] = field(default_factory=Counter)  # waits for launched work
    busy_waits: Counter[str] = field(default_factory=Counter)  # waits while the device had later work queued
    bytes_in: int = 0  # bytes of all copies to the device

    def totals(self) -> dict[str, int]:
        return {name: counter.total() for name, counter in self._counters()}

    def report(self) -> str:
        """Returns all lines with costs, the most frequent first in each category."""
        return "\n".join(
            f"{name}: {count} x {cause}"
            for name, counter in self._counters()
            for cause, count in counter.most_common()
        )

    def _counters(self) -> list[tuple[str, Counter[str]]]:
        return [(name, counter) for name, counter in vars(self).items() if isinstance(counter, Counter)]


def cause(operation: object) -> str:
    """Returns the innermost running line of the product, or else of a test, with an operation."""
    frame: FrameType | None = sys._getframe(1)
    of_a_test = ""
    while frame is not None:
        name = _name_of(frame.f_code.co_filename)
        if name.startswith("outrider/"):
            return f"{name}:{frame.f_lineno} {operation}"
        if name and not of_a_test:
            of_a_test = f"{name}:{frame.f_lineno} {operation}"
        frame = frame.f_back
    return of_a_test or str(operation)


@cache
def _name_of(path: str) -> str:
    """Returns the path of one of our files; empty for other files and for files of the simulation."""
    if not path.startswith(f"{ROOT}/") or path.startswith(f"{HERE}/") or "site-packages" in path:
        return ""
    return path.removeprefix(f"{ROOT}/")
