"""How much a new draft drafts: nothing at first, then a growing share of the sequences while it is faster.

A draft is new that has joined a service which runs already. It has to earn its place among the others, for
each task and verification rule by itself, and loses it where another is worth more.
"""

import math
from collections import Counter

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of the sequences, one after the other
ROUNDS = 48  # Drafts of which it has to be known how good they were, before the share grows
DOUBLINGS = 4  # of these, at most: one for each time that it went back


class Rollout:
    """Of one new draft among the sequences of one kind."""

    def __init__(self) -> None:
        self._step = 0  # index into SHARES
        self._seen = 0  # Drafts since the share is what it is
        self._backs = 0  # times that it went back to nothing
        self._due = 0.0  # part of a sequence that it has not been given yet
        self.rate = self.rate_of_others = 0.0  # tokens per second, as last compared; 0: not known
        self.decided_at = -math.inf  # in the event loop's time
        self.changes = Counter[float]()  # times that each share was given

    @property
    def share(self) -> float:
        """Of the sequences that begin, those that it drafts; 0: it only guesses, and is judged."""
        return SHARES[self._step]

    @property
    def seen(self) -> int:
        """Drafts at this share of which it is known how good they were."""
        return self._seen

    @property
    def needed(self) -> int:
        """Drafts that it has to be known of before the share grows."""
        return ROUNDS << min(self._backs, DOUBLINGS)

    def observe(self) -> None:
        """It is known how good one more of its Drafts was."""
        self._seen += 1

    def compare(self, rate: float, rate_of_others: float, margin: float) -> None:
        """It gets more, or goes back to nothing, where the difference is large enough.

        Args:
            rate: tokens per second that it is worth; 0: not known yet, as of the others.
            rate_of_others: of the best one that is not new.
            margin: share by which one has to be worth more than the other.
        """
        self.rate, self.rate_of_others = rate, rate_of_others
        if not rate or not rate_of_others:
            return
        if rate_of_others > (1.0 + margin) * rate:
            self.go_back()
        elif rate > (1.0 + margin) * rate_of_others and self._seen >= self.needed:
            self._give(min(self._step + 1, len(SHARES) - 1))

    def go_back(self) -> None:
        """From now on it drafts nothing, and has to show anew, and for longer, what it is worth."""
        if self._step:
            self._backs += 1
            self._give(0)

    def admits(self) -> bool:
        """Whether a sequence that begins is one of its share."""
        self._due += self.share
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def _give(self, step: int) -> None:
        if step != self._step:
            self._step, self._seen, self._due = step, 0, 0.0
            self.changes[self.share] += 1
