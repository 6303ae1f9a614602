"""Costs of a drafter: the time from a Verdict to the next Draft sent, at each worker. Torch-free."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
from numpy.typing import ArrayLike

from outrider.drafters.registry import DrafterInfo
from outrider.learning.lru import Lru
from outrider.pace.regression import LinearCost, Vector
from outrider.pace.step import Step
from outrider.pace.step_cost import StepCost
from outrider.pace.tuning import TUNING


class RoundCost:
    """Seconds of a round outside of draft and target, as a function of the sequences in rounds."""

    def __init__(self) -> None:
        self._cost = LinearCost(TUNING.round_reluctance)

    def observe(self, sequences: int, seconds: float) -> None:
        """Learns from one sequence's round. The seconds are raised to a minimum, since 0 would be ignored.

        Otherwise a target that starts its rounds under a lease would be known only by the first round.

        sequences: sequences in rounds.
        """
        self._cost.observe(np.array([1.0, sequences]), max(seconds, TUNING.least_overhead_s), sequences)

    def seconds(self, sequences: ArrayLike) -> Vector:
        constant, per_sequence = self._cost.weights
        return np.asarray(constant + per_sequence * np.asarray(sequences))


class DrafterCost:
    """Seconds that a drafter takes at a worker, outside of the target.

    Draft-ahead hides a share of the time, but at most the duration of the target's step.
    """

    def __init__(self, drafter: DrafterInfo, surveyed: Sequence[Step] = ()) -> None:
        self._drafter = drafter
        self.step = StepCost(surveyed)
        self.round = RoundCost()
        self._hidden = 0.0  # hidden share of the time that draft-ahead could hide
        self._verdicts = 0.0  # verdicts in that share; 0: the worker does not draft ahead

    @property
    def drafts_ahead(self) -> bool:
        """Whether the worker has prepared for Verdicts."""
        return self._verdicts > 0.0

    def observe_ahead(
        self, sequences: int, depth: int, seconds: float, target_step_s: float, ahead_hit: bool
    ) -> None:
        """Learns the seconds from a Verdict to the next Draft sent, at a worker that drafts ahead."""
        if not self._verdicts:
            self._hidden, self._verdicts = TUNING.prior_hidden, TUNING.prior_hidden_verdicts
        alone = float(self._alone(sequences, depth))
        could_hide = max(min(alone, target_step_s), TUNING.least_round_s)
        hidden = (alone - seconds) / could_hide if ahead_hit else 0.0
        self._verdicts = min(self._verdicts + 1.0, TUNING.hidden_memory)
        self._hidden += (min(max(hidden, 0.0), 1.0) - self._hidden) / self._verdicts

    def seconds(self, sequences: Vector, depth: Vector, alternatives: Vector, target_step: Vector) -> Vector:
        """Returns the seconds from a Verdict to the next Draft sent; arguments broadcast.

        Args:
            alternatives: total number of nodes next to chains that the drafter's model processes.
            target_step: seconds of the target's step.
        """
        alone = self._alone(sequences, depth, alternatives)
        return np.asarray(alone - self._hidden * np.minimum(alone, target_step))

    def _alone(self, sequences: ArrayLike, depth: ArrayLike, alternatives: ArrayLike = 0.0) -> Vector:
        return self.round.seconds(sequences) + self._steps(sequences, depth, alternatives)

    def _steps(self, sequences: ArrayLike, depth: ArrayLike, alternatives: ArrayLike) -> Vector:
        drafter = self._drafter
        steps = drafter.steps_per_draft + drafter.steps_per_token * np.asarray(depth)
        positions = np.maximum(depth, 1) if drafter.is_parallel else np.ones(())
        tokens = np.multiply(sequences, positions) + np.asarray(alternatives) / np.maximum(depth, 1)
        return np.asarray(steps * self.step.seconds(sequences, tokens))


class DrafterCosts:
    """Costs of a drafter at each of its workers."""

    def __init__(self, drafter: DrafterInfo, surveyed: Sequence[Step] = ()) -> None:
        """surveyed: steps that its worker timed before it served."""
        self._newest = DrafterCost(drafter, surveyed)  # cost that was used last
        self._of_worker = Lru[str, DrafterCost](TUNING.most_workers)

    def at(self, worker: str) -> DrafterCost:
        """Returns the cost at a worker; a new worker begins with the cost of another worker.

        worker: address; empty: any worker, or a drafter without workers.
        """
        if worker:
            self._newest = self._of_worker.get(worker, self._like_newest)
        return self._newest

    def _like_newest(self) -> DrafterCost:
        cost = deepcopy(self._newest)
        cost.step.restart()
        return cost
