"""Whether a step should wait for sequences whose next Draft is on its way."""

import time
from collections.abc import Callable, Iterable

from decoding.pace.cost import StepCost, StepSize
from engine.sequence import Sequence
from engine.tasks import Task
from engine.verify import VerifyTask
from engine.work import Result, Verified

FORGETTING = 0.1  # weight of the newest absence in the mean
PATIENT_FOR = 2.0  # times the mean absence; whoever is away for longer is not waited for


class Gathering:
    """Rounds alone leave the target idle between a Verdict and the next Draft.

    Before a step it is known who is absent, and from earlier absences when each should be back. Waiting for
    the next k of them saves a step of their own: what two steps would take more than one together. It costs
    the wait. The step waits for the k for which it gains most, and begins at once where no k gains, or where
    anybody decodes freely or takes in a prompt: they would lose what the others gain.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """block_size: committed tokens up to which a sequence goes on after a round; more are a prompt."""
        self._block_size = block_size
        self._clock = clock
        self._cost = StepCost()
        self._absent_since: dict[Sequence, float] = {}
        self._absence = 0.0  # seconds, mean

    def stepped(self, size: StepSize, seconds: float) -> None:
        """A step is over."""
        self._cost.observe(size, seconds)

    def answered(self, results: Iterable[Result]) -> None:
        """Whoever got a Verdict is away until its next Draft comes."""
        now = self._clock()
        for result in results:
            if isinstance(result, Verified) and result.finish is None:
                self._absent_since[result.sequence] = now

    def returned(self, sequence: Sequence) -> None:
        """It has work again."""
        since = self._absent_since.pop(sequence, None)
        if since is None:
            return
        absence = self._clock() - since
        if self._absence:
            absence = min(absence, PATIENT_FOR * self._absence)  # one client that dawdles is no measure
        self._absence += (FORGETTING if self._absence else 1.0) * (absence - self._absence)

    def left(self, sequence: Sequence) -> None:
        """It is closed."""
        self._absent_since.pop(sequence, None)

    def patience(self, tasks: Iterable[Task]) -> float:
        """Seconds to wait before these begin, unless work comes earlier; 0: begin."""
        ready = list(tasks)
        if not self._absent_since or not self._cost.is_known or not all(map(self._is_round, ready)):
            return 0.0
        tokens = sum(_tokens(task) for task in ready)
        each = tokens / len(ready)
        best_gain, best_wait = 0.0, 0.0
        alone = self._seconds(len(ready), tokens)
        for count, wait in enumerate(self._arrivals(), start=1):
            others = self._seconds(count, count * each)
            together = self._seconds(len(ready) + count, tokens + count * each)
            gain = alone + others - together - wait
            if gain > best_gain:
                best_gain, best_wait = gain, wait
        return best_wait

    def _arrivals(self) -> list[float]:
        """Seconds until the absent are expected, soonest first."""
        now, usual = self._clock(), self._absence
        away = [now - since for since in self._absent_since.values()]
        # One who is overdue may come at any moment: as a guess, within a tenth of the usual absence.
        return sorted(max(usual - time, usual / 10) for time in away if time < PATIENT_FOR * usual)

    def _seconds(self, sequences: float, tokens: float) -> float:
        return float(self._cost.seconds(sequences, tokens))

    def _is_round(self, task: Task) -> bool:
        return isinstance(task, VerifyTask) and _suffix(task) <= self._block_size


def _suffix(task: Task) -> int:
    """Committed tokens that are not cached yet."""
    return len(task.sequence.tokens) - task.sequence.cached


def _tokens(task: Task) -> int:
    return _suffix(task) + len(task.tree())
