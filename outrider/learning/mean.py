"""Exponential moving averages.

The parameter of each average is its memory: an observation weighs 1/e after that many later observations.
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
    """Exponential moving average that starts at a prior value."""

    value: float
    memory: float  # observations

    def observe(self, value: float, observations: float = 1.0) -> None:
        """Learns a value that was observed ``observations`` times; 0 is a no-op."""
        self.value += (1.0 - kept(self.memory, observations)) * (value - self.value)


@dataclass
class Rate:
    """Ratio of two sums that decay with each observation, such as correct / reached tokens."""

    memory: float  # observations
    hits: float = 0.0
    total: float = 0.0

    def __post_init__(self) -> None:
        self._kept = kept(self.memory)

    def observe(self, hits: float, total: float = 1.0) -> None:
        """Learns from one observation; (0, 0) only decays the older observations."""
        self.hits = self._kept * self.hits + hits
        self.total = self._kept * self.total + total

    def value(self, prior: float, weight: float = 0.0) -> float:
        """Returns the ratio, shrunk towards ``prior`` by ``weight``; the prior if nothing was observed."""
        total = self.total + weight
        return (self.hits + weight * prior) / total if total else prior
