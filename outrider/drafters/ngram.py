"""Drafting without a model: tokens that followed the last few tokens when they occurred before. Torch-free.

Source: Saxena, "Prompt lookup decoding", 2023.
"""

from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Continuation


class NgramIndex:
    """Index of the n-grams of a sequence: where each n-gram ended last with a token after it."""

    def __init__(self, tokens: Sequence[int] = (), longest: int = 3, shortest: int = 1) -> None:
        """
        Raises:
            ValueError: the sizes violate 1 <= shortest <= longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest={shortest} must be at least 1 and at most longest={longest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self.append(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds committed tokens."""
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._followed_at[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def propose(self, depth: int) -> Draft:
        """Returns the chain of ``guess``."""
        return Draft.chain(self.guess(depth).tokens)

    def guess(self, depth: int) -> Continuation:
        """Returns the tokens after the latest earlier occurrence of the longest suffix, or nothing.

        A continuation that reaches the newest token repeats itself, so a repetition is followed to any depth.
        """
        for size in self._sizes:
            start = self._followed_at.get(tuple(self._tokens[-size:])) if size <= len(self._tokens) else None
            if start is not None:
                period = len(self._tokens) - start
                tokens = tuple(self._tokens[start + offset % period] for offset in range(depth))
                return Continuation(tokens, matched=size)
        return Continuation()
