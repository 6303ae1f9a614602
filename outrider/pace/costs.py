"""Costs of a target and its drafters: timings are observed, and times are predicted. Torch-free."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.drafters.registry import DrafterInfo
from outrider.pace.calibration import Calibration
from outrider.pace.drafter_cost import DrafterCost, DrafterCosts
from outrider.pace.regression import Vector
from outrider.pace.step import Step
from outrider.pace.step_cost import StepCost
from outrider.pace.tuning import TUNING

# Function from a drafter's name to steps that it timed before it served; the empty name is the target.
Surveyed = Callable[[str], Sequence[Step]]


def nothing_surveyed(name: str) -> Sequence[Step]:
    """Returns no steps: all costs are learned from requests."""
    return ()


@dataclass(frozen=True)
class RoundTimes:
    """Measured times of a round."""

    depth: int  # number of guesses in the chain
    seconds: float  # time that the round spent outside of the target
    overhead_s: float  # part of ``seconds`` outside of the drafter
    target_s: float  # time that the round spent at the target, before and in its step
    ahead_hit: bool | None = None  # whether draft-ahead had prepared the Draft; None: nothing was prepared


@dataclass(frozen=True)
class Expectation:
    """Predicted times on which the newest decision is based."""

    round_s: float = math.nan  # seconds from Verdict to Verdict
    step_s: float = math.nan  # seconds of a token of plain decoding while sequences are in rounds
    plain_s: float = math.nan  # seconds of a token of plain decoding, if no sequence were in rounds
    in_rounds: Counter[str] = field(default_factory=Counter)  # sequences in rounds, by drafter


@dataclass(frozen=True)
class BatchCosts:
    """Costs at the batch's mean context length; the slowest drafter determines the drafting time."""

    target: StepCost
    drafters: list[tuple[DrafterCost, float]]  # each with its share of the sequences
    context: float  # tokens per sequence
    calibration: Vector  # [sequences, MAX_DEPTH]
    plain_factor: float
    draft_in_step: bool

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        return self.target.seconds(sequences, tokens, self.context * sequences)

    def drafting(
        self, sequences: Vector, depth: Vector, alternatives: Vector | float, target_step: Vector
    ) -> Vector:
        seconds = [
            drafter.seconds(share * sequences, depth, share * np.asarray(alternatives), target_step)
            for drafter, share in self.drafters
        ]
        return np.asarray(np.max(seconds, axis=0))


class TargetCosts:
    """Costs at one target: its steps, its drafters, and the rounds of its sequences."""

    def __init__(self, surveyed: Surveyed = nothing_surveyed) -> None:
        self._surveyed = surveyed
        self._target = StepCost(surveyed(""))
        self._newest_step_s = 0.0  # seconds of the target's newest step
        self._drafters: dict[str, DrafterCosts] = {}
        self._calibration = Calibration()
        self.expected = Expectation()  # predictions of the newest decision
        self._plain_s: float | None = None  # seconds of a step of plain decoding, averaged; None: not known
        self._averaged_s = self._busy_s = 0.0  # seconds of steps in that average, and since then

    @property
    def are_known(self) -> bool:
        """Whether enough steps of the target were seen."""
        return self._target.is_known

    def observe_step(self, step: Step) -> bool:
        """Learns from a step of the target; returns False if another sequence has reported it."""
        self._newest_step_s = step.seconds
        if not self._target.observe(step):
            return False
        self._busy_s += step.seconds
        self._calibration.observe_step(self.expected.in_rounds.keys())
        return True

    def observe_drafting(self, drafter: DrafterInfo, worker: str, step: Step) -> None:
        """Learns from a step of a drafter's model."""
        self._of(drafter, worker).step.observe(step)

    def observe_round(
        self, drafter: DrafterInfo, worker: str, sequences: int, times: RoundTimes, *, is_first: bool = False
    ) -> None:
        """Learns from a round.

        Args:
            sequences: sequences in rounds with that drafter and worker.
            is_first: whether it follows plain decoding, during which nothing is drafted ahead.
        """
        cost = self._of(drafter, worker)
        if not times.ahead_hit:
            cost.round.observe(sequences, times.overhead_s)
        if times.ahead_hit is not None or (cost.drafts_ahead and not is_first):
            hit = bool(times.ahead_hit)  # a busy worker prepares for few of its sequences
            cost.observe_ahead(sequences, times.depth, times.seconds, self._newest_step_s, hit)

    def compare_round(self, drafter: str, times: RoundTimes, tokens: float, expected_tokens: float) -> None:
        """Compares a round with its predicted times and tokens."""
        count = max(self.expected.in_rounds[drafter], 1)
        seconds = times.seconds + times.target_s
        self._calibration.observe_round(drafter, times.depth, seconds, self.expected.round_s, count)
        self._calibration.observe_tokens(drafter, tokens, expected_tokens, count)

    def compare_plain(self, seconds: float, sequences: int, is_trial: bool) -> None:
        """Compares a token of plain decoding with the time that was expected.

        Args:
            sequences: sequences at the target; some may have left since the decision.
            is_trial: whether the sequence is in rounds, except for these few tokens.
        """
        in_rounds = self.expected.in_rounds.total()
        plain = max(sequences - in_rounds, 1)
        if is_trial or not in_rounds:
            count = max(in_rounds, 1) if is_trial else plain
            self._calibration.observe_plain(seconds, self.expected.plain_s, count, is_trial=is_trial)
        else:
            self._calibration.observe_plain_beside_rounds(seconds, self.expected.step_s, plain)

    def batch(self, drafted_by: Sequence[tuple[DrafterInfo, str]], context: float) -> BatchCosts:
        """Returns the costs of a batch.

        Args:
            drafted_by: [sequences] drafter and worker of each sequence; without a worker, the costs of the
                worker that was used last hold.
            context: tokens per sequence.
        """
        counts = Counter(self._of(drafter, worker) for drafter, worker in drafted_by)
        shares = [(cost, count / len(drafted_by)) for cost, count in counts.items()]
        calibration = np.array([self._calibration.factors(drafter.name) for drafter, _ in drafted_by])
        in_step = all(drafter.waits_in_step for drafter, _ in drafted_by)
        return BatchCosts(self._target, shares, context, calibration, self._calibration.plain_factor, in_step)

    def average_plain(self, running: float, context: float) -> None:
        """Adds the present cost of plain decoding to the published average.

        Args:
            running: sequences at the target.
            context: tokens per sequence.
        """
        if not self._busy_s:
            return
        seconds = self._target.measured(running, context * running)
        if seconds is None:
            return
        self._averaged_s += self._busy_s
        newest = max(self._busy_s / self._averaged_s, -math.expm1(-self._busy_s / TUNING.published_s))
        self._busy_s = 0.0
        before = seconds if self._plain_s is None else self._plain_s
        self._plain_s = before * (seconds / before) ** newest

    def plain_rate(self, sequences: int) -> float | None:
        """Tokens per second of plain decoding for that many sequences; None: not known yet.

        The time of a step is averaged over the last ``published_s`` seconds of steps, because a single fit
        varies with its few steps.
        """
        if not sequences:
            return 0.0
        return None if self._plain_s is None else sequences / self._plain_s

    def _of(self, drafter: DrafterInfo, worker: str) -> DrafterCost:
        if drafter.name not in self._drafters:
            self._drafters[drafter.name] = DrafterCosts(drafter, self._surveyed(drafter.asked))
        return self._drafters[drafter.name].at(worker)
