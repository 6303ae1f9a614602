"""Delays between attempts, doubled after each failure up to a limit."""

from dataclasses import dataclass

MAX_DOUBLINGS = 64  # a larger power of two could overflow; every limit in use is far below it


@dataclass(frozen=True)
class Backoff:
    """Rule for delays, or for any other quantity that doubles, in the unit of its two limits."""

    shortest: float
    longest: float

    def after(self, failures: int) -> float:
        """Returns the delay before the next attempt: the shortest after 0 earlier failures."""
        return min(self.shortest * 2.0 ** min(failures, MAX_DOUBLINGS), self.longest)
