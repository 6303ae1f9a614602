"""What a drafter without a model is: an index over the tokens of one sequence."""

from typing import Protocol

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.settings import Verification
from outrider.drafters.occurrences import Guess


class Index(Protocol):
    """Of one sequence. Its length is the number of tokens that it has been told."""

    def __len__(self) -> int: ...

    def append(self, tokens: list[int]) -> None:
        """Takes note of tokens that have been committed."""

    def propose(self, depth: int) -> Draft:
        """A chain of at most ``depth`` tokens that may follow; empty where nothing is known."""


class ScoredIndex(Index, Protocol):
    """One that knows how good its guesses are."""

    def guess(self, depth: int) -> Guess:
        """What ``propose`` makes its chain of."""


def as_drawn(draft: Draft, rule: Verification) -> Draft:
    """Returns the Draft with probability 1 for each guess, unless verification is coupled."""
    if rule == "coupled":
        return draft
    return Draft.chain(draft.tokens, [SparseProbs((token,), (1.0,)) for token in draft.tokens])
