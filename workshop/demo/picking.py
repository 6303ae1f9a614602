"""Random choices with a favourite: weight 1 / rank keeps greedy decoding of generated text away from ties."""

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

Choice = TypeVar("Choice")


class EvenRandom(Random):
    """Random choices without favourites: they cannot be guessed, only read."""

    def choices(self, population: Any, *_: Any, k: int = 1, **__: Any) -> list[Any]:
        """Draws without the weights."""
        return super().choices(population, k=k)


def pick(random: Random, options: Sequence[Choice]) -> Choice:
    """Returns one of `options`, the option at index i with a weight of 1 / (i + 1)."""
    return random.choices(options, [1 / rank for rank in range(1, len(options) + 1)])[0]


def pick_number(random: Random, low: int, high: int) -> int:
    """Returns an integer from low to high inclusive, small numbers more often."""
    return pick(random, range(low, high + 1))
