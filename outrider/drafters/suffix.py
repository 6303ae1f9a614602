"""Drafting without a model: what followed the newest tokens before, in this text or in past answers.

Source: Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI applications", 2024.
"""

from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Guess, Occurrences
from outrider.drafters.past_answers import NOBODYS, PastAnswers, Scope


class SuffixIndex:
    """Tokens of one Sequence, beside the past answers of its scope."""

    def __init__(self, past: PastAnswers | None = None, scope: Scope = NOBODYS) -> None:
        """past: None: it drafts from its own tokens alone."""
        self._own = Occurrences()
        self._past = PastAnswers() if past is None else past
        self._scope = scope

    def __len__(self) -> int:
        return len(self._own)

    def append(self, tokens: Sequence[int]) -> None:
        """Takes note of tokens that have been committed."""
        self._own.append(tokens)

    def guess(self, depth: int) -> Guess:
        """The better one of what its own text and past answers say; its own where they are as good."""
        context = self._own.tail()
        own = self._own.guess(context, depth)
        past = self._past.of(self._scope).guess(context, depth)
        return past if past.score > own.score else own

    def propose(self, depth: int) -> Draft:
        """A chain of at most ``depth`` tokens; empty where the newest token has not occurred before."""
        return Draft.chain(self.guess(depth).tokens)
