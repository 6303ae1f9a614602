"""Times to the first tokens of the sequences that came lately, by which Serve may scale."""

import math
import time
from collections import deque

RECENT_S = 60.0  # seconds for which a time counts
TAIL = 0.9  # share of the times that are at most the tail


class FirstTokens:
    """Times from the first work on a new sequence to its first token."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque()  # when a time ended, and the time; seconds

    def add(self, seconds: float) -> None:
        self._times.append((time.monotonic(), seconds))

    def tail(self) -> float:
        """Returns the seconds that nine of ten recent times are at most; 0.0 without any."""
        while self._times and self._times[0][0] < time.monotonic() - RECENT_S:
            self._times.popleft()
        ordered = sorted(seconds for _, seconds in self._times)
        return ordered[math.ceil(TAIL * len(ordered)) - 1] if ordered else 0.0
