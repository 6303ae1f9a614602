"""Exponential means: older observations weigh less and less.

One number sets each of them, the memory: an observation weighs 1/e after that many later observations.
"""

from dataclasses import dataclass


def kept(memory: float, observations: float = 1.0) -> float:
    """Returns the share of its weight that an observation keeps after later observations.

    Args:
        memory: observations; greater than 1, or 1 to keep nothing.
        observations: number of later observations; may be a fraction.
    """
    return float((1.0 - 1.0 / memory) ** observations)


@dataclass
class Mean:
    """Exponential mean that begins at a prior value."""

    value: float
    memory: float  # observations

    def observe(self, value: float, observations: float = 1.0) -> None:
        """Learns a value that was observed that many times; 0 times change nothing."""
        self.value += (1.0 - kept(self.memory, observations)) * (value - self.value)


@dataclass
class Rate:
    """Ratio of two sums that both lose weight with each observation, such as correct to reached tokens."""

    memory: float  # observations
    hits: float = 0.0
    total: float = 0.0

    def __post_init__(self) -> None:
        self._kept = kept(self.memory)

    def observe(self, hits: float, total: float = 1.0) -> None:
        """Learns from one observation; (0, 0) only lets older observations lose weight."""
        self.hits = self._kept * self.hits + hits
        self.total = self._kept * self.total + total

    def value(self, prior: float, weight: float = 0.0) -> float:
        """Returns the ratio, pulled to a prior ratio by its weight; the prior if nothing was observed."""
        total = self.total + weight
        return (self.hits + weight * prior) / total if total else prior
