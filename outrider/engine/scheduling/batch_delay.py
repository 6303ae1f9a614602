"""Decides whether a step should wait for sequences whose next Draft is on its way."""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.learning.mean import Mean
from outrider.pace.step import Step
from outrider.pace.step_cost import StepCost

ABSENCE_MEMORY = 10.0  # absences after which an observation weighs 1/e in the mean absence
PATIENT_FOR = 2.0  # multiple of the mean absence; a step no longer waits for a sequence away for longer

REPAID_IN = 4  # rounds in which a wait must pay off
MARGIN = 0.5  # share of the mean absence that is added to the expected wait


class BatchDelay:
    """Delay of a step for sequences in rounds, which are absent between a Verdict and their next Draft.

    The mean absence predicts when each absent sequence returns. Suppose the step waits for the next k
    sequences. Then a round of all sequences takes one step and one absence. Without the wait there are two
    groups with a step each, and a group computes while the other group is absent. Then a round takes two
    steps, or one step and an absence if that is longer.

    The step waits for the k with the largest gain after the wait, and begins at once if no k gains.
    Sequences of one step mostly return together, so a wait may pay off over several rounds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: time in seconds."""
        self._clock = clock
        self._cost = StepCost()
        self._absent_since: dict[Hashable, float] = {}
        self._absence = Mean(0.0, ABSENCE_MEMORY)  # seconds; 0: no sequence has returned yet

    def stepped(self, step: Step) -> None:
        """Updates the cost of steps from a measured step."""
        self._cost.observe(step)

    def answered(self, sequences: Iterable[Hashable]) -> None:
        """Records that these sequences got Verdicts and are absent until their next Drafts come."""
        now = self._clock()
        self._absent_since |= dict.fromkeys(sequences, now)

    def returned(self, sequence: Hashable, arrived: float) -> None:
        """Records that a sequence has work again. arrived: arrival time of that work by the clock."""
        since = self._absent_since.pop(sequence, None)
        if since is None:
            return
        absence = max(arrived - since, 0.0)
        if self._absence.value:
            # Limited, since a slow client may stay away for long.
            self._absence.observe(min(absence, PATIENT_FOR * self._absence.value))
        else:
            self._absence.value = absence

    def left(self, sequence: Hashable) -> None:
        """Forgets a closed sequence."""
        self._absent_since.pop(sequence, None)

    def patience(self, tokens: Sequence[int]) -> float:
        """Returns the seconds to wait before the next step, unless work comes earlier; 0: begin now.

        tokens: number of tokens of each ready sequence; all these sequences are in rounds.
        """
        if not self._absent_since or not self._cost.is_known:
            return 0.0
        waits = self._arrivals()
        if not len(waits):
            return 0.0
        ready, total, usual = len(tokens), sum(tokens), self._absence.value
        more = np.arange(1, len(waits) + 1)
        first = self._cost.seconds(ready, total)
        second = self._cost.seconds(more, more * total / ready)
        together = usual + self._cost.seconds(ready + more, total * (1 + more / ready))
        apart = np.maximum(first + second, usual + np.maximum(first, second))
        gains = REPAID_IN * (apart - together) - waits
        best = int(gains.argmax())
        # About half of all absences exceed the mean; to give up just before the return costs most.
        return float(waits[best] + MARGIN * usual) if gains[best] > 0.0 else 0.0

    def _arrivals(self) -> NDArray[np.float64]:
        """Returns the seconds until absent sequences are expected, soonest first."""
        usual = self._absence.value
        away = self._clock() - np.fromiter(self._absent_since.values(), np.float64)
        # An overdue sequence may return at any moment: we assume a tenth of the mean absence.
        return np.sort(np.maximum(usual - away[away < PATIENT_FOR * usual], usual / 10))
