"""Rows of a step's logits from which tokens are chosen, by piece of work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

from outrider.decoding.choice_context import ChoiceContext


@dataclass(frozen=True)
class ChoosingRows:
    """Numbers of rows, and contexts of those rows whose settings ask for more than noise.

    A GPU's kernels choose the tokens of all other rows from columns of numbers: see ChoiceInput. A CPU asks
    for ``every`` context, and so does a step with settings that change single tokens. It has to ask before
    a sequence goes on.
    """

    counts: Sequence[int]  # rows of each piece of work
    special: Mapping[int, list[ChoiceContext]]  # contexts by place of the piece of work
    make: Callable[[int], list[ChoiceContext]]  # makes the contexts of a piece of work by its place

    @classmethod
    def of(cls, contexts: Sequence[list[ChoiceContext]]) -> "ChoosingRows":
        """Returns rows whose contexts are all known."""
        return cls([*map(len, contexts)], dict(enumerate(contexts)), contexts.__getitem__)

    @cached_property
    def starts(self) -> list[int]:
        """First row of each piece of work, and the number of all rows."""
        return [*accumulate(self.counts, initial=0)]

    @cached_property
    def every(self) -> list[ChoiceContext]:
        """Contexts of all rows."""
        places = range(len(self.counts))
        parts = (self.special.get(place) or self.make(place) for place in places if self.counts[place])
        return [*chain.from_iterable(parts)]
