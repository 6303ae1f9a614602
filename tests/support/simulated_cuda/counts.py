"""What work on a simulated GPU costs, and which lines of ours it comes from."""

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
    """How often each thing happened, by the line and the operation that caused it."""

    launches: Counter[str] = field(default_factory=Counter)  # key: kernel; a replayed graph is one launch
    pinned_copies: Counter[str] = field(default_factory=Counter)  # to the device, out of pinned memory
    pageable_copies: Counter[str] = field(default_factory=Counter)  # to the device, out of other memory
    copies_out: Counter[str] = field(default_factory=Counter)  # from the device
    waits: Counter[str] = field(default_factory=Counter)  # for what was launched
    busy_waits: Counter[str] = field(default_factory=Counter)  # waits while the device had more to do
    bytes_in: int = 0  # bytes of all copies to the device

    def totals(self) -> dict[str, int]:
        return {name: counter.total() for name, counter in self._counters()}

    def report(self) -> str:
        """Every line that caused something, the most expensive first."""
        return "\n".join(
            f"{name}: {count} x {cause}"
            for name, counter in self._counters()
            for cause, count in counter.most_common()
        )

    def _counters(self) -> list[tuple[str, Counter[str]]]:
        return [(name, counter) for name, counter in vars(self).items() if isinstance(counter, Counter)]


def cause(operation: object) -> str:
    """The newest line of the product that is being run, or else of a test, and what it does."""
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
    """Returns the name of a file of ours; none for other files, and for those that simulate."""
    if not path.startswith(f"{ROOT}/") or path.startswith(f"{HERE}/") or "site-packages" in path:
        return ""
    return path.removeprefix(f"{ROOT}/")
