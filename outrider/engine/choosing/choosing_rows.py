"""Rows of a step's logits from which tokens are chosen, grouped by piece of work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

from outrider.decoding.choice_context import ChoiceContext


@dataclass(frozen=True)
class ChoosingRows:
    """Counts of rows, and contexts of the rows whose settings need more than keyed noise.

    A GPU's kernels choose the tokens of all other rows from columns of numbers: see ChoiceInput. ``every``
    makes all contexts, for a CPU or for a step with settings that change single tokens. It must be read
    before any sequence of the step gets new tokens.
    """

    counts: Sequence[int]  # number of rows of each piece of work
    special: Mapping[int, list[ChoiceContext]]  # contexts by index of the piece of work
    make: Callable[[int], list[ChoiceContext]]  # makes the contexts of a piece of work from its index

    @classmethod
    def of(cls, contexts: Sequence[list[ChoiceContext]]) -> "ChoosingRows":
        """Returns rows whose contexts are all known."""
        return cls([*map(len, contexts)], dict(enumerate(contexts)), contexts.__getitem__)

    @cached_property
    def starts(self) -> list[int]:
        """First row of each piece of work, then the number of all rows."""
        return [*accumulate(self.counts, initial=0)]

    @cached_property
    def every(self) -> list[ChoiceContext]:
        """Contexts of all rows."""
        places = range(len(self.counts))
        parts = (self.special.get(place) or self.make(place) for place in places if self.counts[place])
        return [*chain.from_iterable(parts)]
