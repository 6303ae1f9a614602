"""Times to first token of recent sequences, by which Serve may scale."""

import math
import time
from collections import deque

RECENT_S = 60.0  # seconds after which a time no longer counts
TAIL = 0.9  # quantile that is reported


class FirstTokens:
    """Times from the first work on a new sequence to its first token."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque()  # end and duration of each wait, in seconds

    def add(self, seconds: float) -> None:
        self._times.append((time.monotonic(), seconds))

    def tail(self) -> float:
        """Returns the p90 of the recent times, in seconds; 0.0 without recent times."""
        while self._times and self._times[0][0] < time.monotonic() - RECENT_S:
            self._times.popleft()
        ordered = sorted(seconds for _, seconds in self._times)
        return ordered[math.ceil(TAIL * len(ordered)) - 1] if ordered else 0.0
