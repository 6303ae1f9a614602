"""Limit of so much in a minute: what is used up comes back evenly over time."""

import math
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Allowance that is full at first. What it gives fills up again within a minute."""

    def __init__(self, limit: int, gateways: int, clock: Callable[[], float]) -> None:
        """
        Args:
            limit: units that the service gives in a minute, and at most at once.
            gateways: gateways of the service, each of which gives an equal part.
            clock: seconds.
        """
        self.limit = limit
        self._gateways = gateways
        self._size = limit / gateways
        self._clock = clock
        self._level = self._size
        self._filled_at = clock()

    def give(self, units: float) -> None:
        """Takes units out; a negative number puts units back."""
        self._level = self._filled() - units

    def wait_s(self, units: float) -> float:
        """Returns the seconds until that many units can be given, 0 if they can be given now.

        A full bucket gives more than it holds, and owes the rest: any request is possible once in a while.
        """
        return max(min(units, self._size) - self._filled(), 0.0) * MINUTE_S / self._size

    @property
    def left(self) -> int:
        """Units that can be given now, by this gateway and by all others if they gave as many."""
        return max(math.floor(self._filled() * self._gateways), 0)

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full again."""
        return self.wait_s(self._size)

    def _filled(self) -> float:
        """Returns the units that it holds now; below 0: it owes some."""
        now = self._clock()
        more = (now - self._filled_at) * self._size / MINUTE_S
        self._level, self._filled_at = min(self._level + more, self._size), now
        return self._level
