"""Random choices with weight 1 / rank, so that greedy decoding of generated text has few near-ties."""

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

Choice = TypeVar("Choice")


class EvenRandom(Random):
    """Uniform random choices: a model cannot guess them, only copy them from its context."""

    def choices(self, population: Any, *_: Any, k: int = 1, **__: Any) -> list[Any]:
        """Draws uniformly; weights are ignored."""
        return super().choices(population, k=k)


def pick(random: Random, options: Sequence[Choice]) -> Choice:
    """Returns a random option; the option at index i has a weight of 1 / (i + 1)."""
    return random.choices(options, [1 / rank for rank in range(1, len(options) + 1)])[0]


def pick_number(random: Random, low: int, high: int) -> int:
    """Returns an integer from low to high inclusive; small numbers are more frequent."""
    return pick(random, range(low, high + 1))
