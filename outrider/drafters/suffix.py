"""Drafting without a model: tokens after earlier occurrences of the newest tokens, also in past answers.

Source: Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI applications", 2024.
"""

from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Continuation, Occurrences
from outrider.drafters.past_answers import NOBODYS, PastAnswers, Scope


class SuffixIndex:
    """Index over one sequence and the past answers of its scope."""

    def __init__(self, past: PastAnswers | None = None, scope: Scope = NOBODYS) -> None:
        """past: past answers; None: the index guesses from its own tokens alone."""
        self._own = Occurrences()
        self._past = PastAnswers() if past is None else past
        self._scope = scope

    def __len__(self) -> int:
        return len(self._own)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds committed tokens."""
        self._own.append(tokens)

    def guess(self, depth: int) -> Continuation:
        """Returns the better guess from the sequence's own text or from past answers; own text wins a tie."""
        context = self._own.tail()
        own = self._own.guess(context, depth)
        past = self._past.of(self._scope).guess(context, depth)
        return past if past.score > own.score else own

    def propose(self, depth: int) -> Draft:
        """Returns a chain of at most ``depth`` tokens; empty if the newest token has not occurred before."""
        return Draft.chain(self.guess(depth).tokens)
