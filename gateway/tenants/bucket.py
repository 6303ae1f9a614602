"""Limit of so much in a minute: what is used up comes back evenly over time."""

import math
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Allowance that is full at first. What it gives fills up again within a minute."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """
        Args:
            limit: units that it gives in a minute, and at most at once.
            clock: seconds.
        """
        self.limit = limit
        self._clock = clock
        self.level = float(limit)

    @property
    def level(self) -> float:
        """Units that it holds now; below 0: it owes some."""
        more = (self._clock() - self._filled_at) * self.limit / MINUTE_S
        return min(self._level + more, float(self.limit))

    @level.setter
    def level(self, units: float) -> None:
        self._level, self._filled_at = units, self._clock()

    def give(self, units: float) -> None:
        """Takes units out; a negative number puts units back."""
        self.level -= units

    def wait_s(self, units: float) -> float:
        """Returns the seconds until that many units can be given, 0 if they can be given now.

        A full bucket gives more than it holds, and owes the rest: any request is possible once in a while.
        """
        return max(min(units, self.limit) - self.level, 0.0) * MINUTE_S / self.limit

    @property
    def left(self) -> int:
        """Units that can be given now."""
        return max(math.floor(self.level), 0)

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full again."""
        return self.wait_s(self.limit)
