"""Drafter without a model: an index over the tokens of one sequence."""

from typing import Protocol

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.settings import Verification
from outrider.drafters.occurrences import Continuation


class Index(Protocol):
    """Index over one sequence. Its length is the number of tokens that were appended."""

    def __len__(self) -> int: ...

    def append(self, tokens: list[int]) -> None:
        """Adds committed tokens."""

    def propose(self, depth: int) -> Draft:
        """Returns a chain of at most ``depth`` tokens that may follow; empty if nothing is known."""


class ScoredIndex(Index, Protocol):
    """Index that also returns the evidence for its guesses."""

    def guess(self, depth: int) -> Continuation:
        """Returns the tokens of ``propose``'s chain, with their probabilities if they are known."""


def as_drawn(draft: Draft, rule: Verification) -> Draft:
    """Returns the Draft, with ``draft_probs`` of 1 for each token unless verification is coupled."""
    if rule == "coupled":
        return draft
    return Draft.chain(draft.tokens, [SparseProbs((token,), (1.0,)) for token in draft.tokens])
