"""Poisson distribution: the number of rare, independent events."""

import math


def at_least(count: int, expected: float) -> float:
    """Returns the probability of at least ``count`` events if their expected number is ``expected``."""
    term, below = math.exp(-expected), 0.0
    for number in range(count):
        below += term
        term *= expected / (number + 1)
    return max(0.0, 1.0 - below)
