"""Token bucket: a limit per minute, whose used units are refilled evenly over time."""

import math
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Token bucket that is full at first, and is refilled within a minute."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """
        Args:
            limit: units per minute, and most units at once.
            clock: returns seconds.
        """
        self.limit = limit
        self._clock = clock
        self.level = float(limit)

    @property
    def level(self) -> float:
        """Units in the bucket now; negative: it has given more than it had."""
        more = (self._clock() - self._filled_at) * self.limit / MINUTE_S
        return min(self._level + more, float(self.limit))

    @level.setter
    def level(self, units: float) -> None:
        self._level, self._filled_at = units, self._clock()

    def give(self, units: float) -> None:
        """Takes units out; a negative number puts units back."""
        self.level -= units

    def wait_s(self, units: float) -> float:
        """Returns the seconds until that many units can be given; 0: they can be given now.

        A full bucket gives more than it holds and owes the rest, so a request of any size is possible at
        times.
        """
        return max(min(units, self.limit) - self.level, 0.0) * MINUTE_S / self.limit

    @property
    def left(self) -> int:
        """Number of whole units that can be given now."""
        return max(math.floor(self.level), 0)

    @property
    def full_in_s(self) -> float:
        """Seconds until the bucket is full again."""
        return self.wait_s(self.limit)
