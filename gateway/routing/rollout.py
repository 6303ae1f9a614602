"""Roll-out of a new draft: no sequences at first, then a growing share of them while it is faster.

A draft is new if it has joined a running service. It gets its share for each task and verification rule
separately. The share returns to 0 if another drafter gives more tokens per second.
"""

import math
from collections import Counter

from gateway.routing.tuning import TUNING


class Rollout:
    """Share of the sequences that a new draft gets, for one task and verification rule."""

    def __init__(self) -> None:
        self._step = 0  # index into the shares
        self._backs = 0  # times that the share returned to 0
        self._due = 0.0  # accumulated share; the draft gets a sequence whenever this reaches 1
        self.seen = 0  # Drafts judged at this share; the router counts them
        self.rate = self.rate_of_others = 0.0  # tokens per second, as compared last; 0: not known
        self.decided_at = -math.inf  # in the event loop's time
        self.changes = Counter[float]()  # times that each share was set

    @property
    def share(self) -> float:
        """Share of new sequences that the draft gets; 0: it only guesses, and is judged."""
        return TUNING.shares[self._step]

    @property
    def needed(self) -> int:
        """Number of Drafts that have to be judged before the share grows."""
        return TUNING.drafts << min(self._backs, TUNING.doublings)

    def compare(self, rate: float, rate_of_others: float, margin: float) -> None:
        """Raises the share by a step or resets it to 0, if the rates differ by more than the margin.

        Args:
            rate: tokens per second with this draft; 0: unknown.
            rate_of_others: tokens per second with the best drafter that is not new; 0: unknown.
            margin: relative difference from which on a drafter counts as better.
        """
        self.rate, self.rate_of_others = rate, rate_of_others
        if not rate or not rate_of_others:
            return
        if rate_of_others > (1.0 + margin) * rate:
            self.go_back()
        elif rate > (1.0 + margin) * rate_of_others and self.seen >= self.needed:
            self._give(min(self._step + 1, len(TUNING.shares) - 1))

    def go_back(self) -> None:
        """Resets the share to 0. The draft has to prove itself anew, with more judged Drafts each time."""
        if self._step:
            self._backs += 1
            self._give(0)

    def admits(self) -> bool:
        """Returns whether a new sequence belongs to the draft's share."""
        self._due += self.share
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def _give(self, step: int) -> None:
        if step != self._step:
            self._step, self.seen, self._due = step, 0, 0.0
            self.changes[self.share] += 1
