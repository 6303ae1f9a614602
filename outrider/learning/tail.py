"""Tail of a stream of observations: a value that few of the newest observations exceed."""

import math
from collections import deque


class Tail:
    """Quantile of the newest observations, recomputed periodically."""

    def __init__(self, share: float, memory: int, renewed_after: int) -> None:
        """
        Args:
            share: share of the observations that are at most the tail, below 1.
            memory: number of newest observations that count.
            renewed_after: observations after which the tail is recomputed; until then it is unknown.
        """
        self._share = share
        self._newest: deque[float] = deque(maxlen=memory)
        self._renewed_after = renewed_after
        self._since = 0  # observations since the tail was computed
        self.value: float | None = None  # in the unit of the observations; None: unknown

    def observe(self, value: float) -> None:
        self._newest.append(value)
        self._since += 1
        if self._since == self._renewed_after:
            self._since = 0
            self.value = sorted(self._newest)[math.ceil(self._share * len(self._newest)) - 1]
