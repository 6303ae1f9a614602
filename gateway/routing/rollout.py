"""How much a new draft drafts: nothing at first, then a growing share of the sequences while it is faster.

A draft is new if it has joined a service that runs already. It has to earn its place for each task
and verification rule separately, and loses it if another drafter is worth more.
"""

import math
from collections import Counter

from gateway.routing.tuning import TUNING


class Rollout:
    """Share of one new draft in the sequences of one task and verification rule."""

    def __init__(self) -> None:
        self._step = 0  # index into the shares
        self._backs = 0  # times that it went back to nothing
        self._due = 0.0  # part of a sequence that it has not been given yet
        self.seen = 0  # judged Drafts at this share, which the router counts
        self.rate = self.rate_of_others = 0.0  # tokens per second, as compared last; 0: not known
        self.decided_at = -math.inf  # in the event loop's time
        self.changes = Counter[float]()  # times that each share was given

    @property
    def share(self) -> float:
        """Share of the beginning sequences that it drafts; 0: it only guesses, and is judged."""
        return TUNING.shares[self._step]

    @property
    def needed(self) -> int:
        """Drafts that have to be judged before the share grows."""
        return TUNING.drafts << min(self._backs, TUNING.doublings)

    def compare(self, rate: float, rate_of_others: float, margin: float) -> None:
        """Gives it more, or takes all, if the difference is large enough.

        Args:
            rate: tokens per second that it is worth; 0, as for the other rate: not known yet.
            rate_of_others: tokens per second of the best drafter that is not new.
            margin: share by which a drafter has to be worth more than another.
        """
        self.rate, self.rate_of_others = rate, rate_of_others
        if not rate or not rate_of_others:
            return
        if rate_of_others > (1.0 + margin) * rate:
            self.go_back()
        elif rate > (1.0 + margin) * rate_of_others and self.seen >= self.needed:
            self._give(min(self._step + 1, len(TUNING.shares) - 1))

    def go_back(self) -> None:
        """Takes all sequences from it. It has to show anew, and for longer, what it is worth."""
        if self._step:
            self._backs += 1
            self._give(0)

    def admits(self) -> bool:
        """Whether a sequence that begins belongs to its share."""
        self._due += self.share
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def _give(self, step: int) -> None:
        if step != self._step:
            self._step, self.seen, self._due = step, 0, 0.0
            self.changes[self.share] += 1
