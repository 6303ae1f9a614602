"""Costs of a target and its drafters: timings are observed, and times are predicted. Torch-free."""

import math
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from outrider.drafters.registry import DrafterInfo
from outrider.learning.lru import Lru
from outrider.pace.calibration import Calibration
from outrider.pace.regression import LinearCost, Vector
from outrider.pace.step import Step, StepSize
from outrider.pace.tuning import TUNING

_UP, _DOWN = np.array(TUNING.hinges_up, np.float64), np.array(TUNING.hinges_down, np.float64)
_BENDS = np.unique([0.0, *_UP, *_DOWN, TUNING.most_tokens])  # tokens; between two of them costs are a line
TOKENS, SEQUENCES, CONTEXT = 1, 2, 4  # columns of the features


class StepCost:
    """Seconds of a forward pass: linear in pieces.

    If reading the weights takes longest, it hides the first tokens. If products of few rows are slow, the
    first tokens cost most.
    """

    def __init__(self) -> None:
        # Constant, tokens, sequences, prompt tokens, context tokens; then the bends, which need evidence.
        self._cost = LinearCost([*TUNING.step_reluctance, *np.ones(len(_UP) + len(_DOWN))])
        self._newest = 0
        self._weights = self._cost.weights
        self._at_bends = np.zeros_like(_BENDS)  # seconds by tokens alone, for these weights

    @property
    def is_known(self) -> bool:
        return self._cost.samples >= TUNING.fit_after

    def observe(self, step: Step) -> bool:
        """Learns from a step, once though several sequences report it; False: it was known."""
        if step.number == self._newest:
            return False
        self._newest = step.number
        self._cost.observe(_features(step.size), step.seconds, step.size.tokens)
        return True

    def seconds(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike = 0.0) -> Vector:
        """Seconds of passes without prompts, never far below the shortest pass seen; arguments broadcast."""
        shortest_s = self._cost.shortest_s / TUNING.outlier_factor
        return np.asarray(np.maximum(self._fitted(sequences, tokens, context_tokens), shortest_s))

    def measured(self, sequences: float, context_tokens: float) -> float | None:
        """Seconds of a pass of plain decoding for that many sequences; None: not known yet.

        It is not known before a pass has decoded, nor if the fit says far less than the shortest pass took.
        """
        if not self.is_known or not self._cost.has_seen[TOKENS]:
            return None
        seconds = float(self._fitted(sequences, sequences, context_tokens))
        return seconds if seconds >= self._cost.shortest_s / TUNING.changed_factor else None

    def _fitted(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike) -> Vector:
        weights = self._cost.weights
        if weights is not self._weights:
            self._weights = weights
            none = np.zeros_like(_BENDS)
            self._at_bends = _columns(none, _BENDS, none, none) @ weights
        # A decision asks some thirty times: interpolation takes a tenth of the time of a product of features.
        seconds = np.interp(np.asarray(tokens, np.float64), _BENDS, self._at_bends)
        seconds = seconds + weights[SEQUENCES] * np.asarray(sequences)
        return np.asarray(seconds + weights[CONTEXT] * np.asarray(context_tokens))


class RoundCost:
    """Seconds of a round outside of draft and target, by how many sequences are in rounds."""

    def __init__(self) -> None:
        self._cost = LinearCost(TUNING.round_reluctance)

    def observe(self, sequences: int, seconds: float) -> None:
        """Learns from one sequence's round. sequences: sequences in rounds."""
        self._cost.observe(np.array([1.0, sequences]), seconds, sequences)

    def seconds(self, sequences: ArrayLike) -> Vector:
        constant, per_sequence = self._cost.weights
        return np.asarray(constant + per_sequence * np.asarray(sequences))


class DrafterCost:
    """Seconds that one drafter takes at one worker, outside of the target.

    Draft-ahead hides a share of the time, but never more than the target's own step lasts.
    """

    def __init__(self, drafter: DrafterInfo) -> None:
        self._drafter = drafter
        self.step = StepCost()
        self.round = RoundCost()
        self._hidden = 0.0  # share of the time that was hidden, of what could be
        self._verdicts = 0.0  # verdicts in that share; 0: Drafts are not prepared there

    def observe_ahead(
        self, sequences: int, depth: int, seconds: float, target_step_s: float, ahead_hit: bool
    ) -> None:
        """Learns the seconds from a Verdict to the next Draft sent, at a worker that prepares Drafts."""
        if not self._verdicts:
            self._hidden, self._verdicts = TUNING.prior_hidden, TUNING.prior_hidden_verdicts
        alone = float(self._alone(sequences, depth))
        could_hide = max(min(alone, target_step_s), TUNING.least_round_s)
        hidden = (alone - seconds) / could_hide if ahead_hit else 0.0
        self._verdicts = min(self._verdicts + 1.0, TUNING.hidden_memory)
        self._hidden += (min(max(hidden, 0.0), 1.0) - self._hidden) / self._verdicts

    def seconds(self, sequences: Vector, depth: Vector, alternatives: Vector, target_step: Vector) -> Vector:
        """Seconds from a Verdict to the next Draft sent; arguments broadcast.

        Args:
            alternatives: nodes besides chains, all together, that the drafter feeds too.
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
    """Seconds that one drafter takes, at each of its workers."""

    def __init__(self, drafter: DrafterInfo) -> None:
        self._newest = DrafterCost(drafter)  # cost that was asked for last
        self._of_worker = Lru[str, DrafterCost](TUNING.most_workers)

    def of(self, worker: str) -> DrafterCost:
        """Cost at a worker; a new worker counts as another one does.

        worker: its address; empty: any, or the drafter has no workers.
        """
        if worker:
            self._newest = self._of_worker.get(worker, lambda: deepcopy(self._newest))
        return self._newest


@dataclass(frozen=True)
class RoundTimes:
    """One round as it went."""

    depth: int  # guesses in the chain
    seconds: float  # time in which the target did not work on the round
    overhead_s: float  # time of these that was spent outside of the drafter too
    target_s: float  # time in which the target had the round, in a step or waiting for one
    ahead_hit: bool | None = None  # whether the Draft was there before its Verdict; None: none was prepared


@dataclass(frozen=True)
class Expectation:
    """Times that the newest decision was made by."""

    round_s: float = math.nan  # seconds from Verdict to Verdict
    step_s: float = math.nan  # seconds of a token of plain decoding, or of its trial
    in_rounds: Counter[str] = field(default_factory=Counter)  # sequences in rounds, by drafter


@dataclass(frozen=True)
class BatchCosts:
    """Costs at the batch's mean context, drafted by the slowest of those that draft."""

    target: StepCost
    drafters: list[tuple[DrafterCost, float]]  # each with its share of the sequences
    context: float  # tokens per sequence
    calibration: Vector  # [sequences, MAX_DEPTH]
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
    """Everything that takes time at one target: its steps, its drafters, the rounds of its sequences."""

    def __init__(self) -> None:
        self._target = StepCost()
        self._newest_step_s = 0.0  # seconds of the target's newest step
        self._drafters: dict[str, DrafterCosts] = {}
        self._calibration = Calibration()
        self._expected = Expectation()
        self._plain_s: float | None = None  # seconds of a step of plain decoding, averaged; None: not known
        self._averaged_s = self._busy_s = 0.0  # seconds of steps in that average, and of steps since then

    @property
    def are_known(self) -> bool:
        """Whether enough steps of the target were seen."""
        return self._target.is_known

    def observe_step(self, step: Step) -> bool:
        """Learns from a step of the target; False: another sequence has reported it."""
        self._newest_step_s = step.seconds
        if not self._target.observe(step):
            return False
        self._busy_s += step.seconds
        self._calibration.stepped(self._expected.in_rounds.keys() if step.had_drafts else ())
        return True

    def observe_drafting(self, drafter: DrafterInfo, worker: str, step: Step) -> None:
        """Learns from a step of a drafter's model."""
        self._of(drafter, worker).step.observe(step)

    def observe_round(self, drafter: DrafterInfo, worker: str, sequences: int, times: RoundTimes) -> None:
        """Learns from a round. sequences: sequences in rounds with that drafter and worker."""
        cost = self._of(drafter, worker)
        if not times.ahead_hit:
            cost.round.observe(sequences, times.overhead_s)
        if times.ahead_hit is not None:
            cost.observe_ahead(sequences, times.depth, times.seconds, self._newest_step_s, times.ahead_hit)

    def compare_round(self, drafter: str, times: RoundTimes, tokens: float, expected_tokens: float) -> None:
        """Compares a round with the times and tokens that it was decided by."""
        count = max(self._expected.in_rounds[drafter], 1)
        seconds = times.seconds + times.target_s
        self._calibration.observe_round(drafter, times.depth, seconds, self._expected.round_s, count)
        self._calibration.observe_tokens(drafter, tokens, expected_tokens, count)

    def compare_plain(self, seconds: float, sequences: int, is_trial: bool) -> None:
        """Compares a token of plain decoding with the time that was expected.

        sequences: all that decode at the target; some of them may have left since the decision.
        """
        plain = sequences - self._expected.in_rounds.total()
        if is_trial and plain > 0:
            return
        count = sequences if is_trial else max(plain, 1)
        self._calibration.observe_plain(seconds, self._expected.step_s, count, is_trial=is_trial)

    def expect(self, expectation: Expectation) -> None:
        """Takes note of what a decision was made by."""
        self._expected = expectation

    def batch(self, drafted_by: Sequence[tuple[DrafterInfo, str]], context: float) -> BatchCosts:
        """Predicts what a batch takes.

        Args:
            drafted_by: [sequences] drafter and worker of each; a sequence without a worker counts at a known
                one.
            context: tokens per sequence.
        """
        counts = Counter(self._of(drafter, worker) for drafter, worker in drafted_by)
        shares = [(cost, count / len(drafted_by)) for cost, count in counts.items()]
        calibration = np.array([self._calibration.of_rounds(drafter.name) for drafter, _ in drafted_by])
        in_step = all(drafter.waits_in_step for drafter, _ in drafted_by)
        return BatchCosts(self._target, shares, context, calibration, in_step)

    def average_plain(self, running: float, context: float) -> None:
        """Takes the present cost of plain decoding into the published average.

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

        The time of a step is averaged over the last ``published_s`` of steps: one fit swings with the few
        steps that it is drawn from.
        """
        if not sequences:
            return 0.0
        return None if self._plain_s is None else sequences / self._plain_s

    def _of(self, drafter: DrafterInfo, worker: str) -> DrafterCost:
        if drafter.name not in self._drafters:
            self._drafters[drafter.name] = DrafterCosts(drafter)
        return self._drafters[drafter.name].of(worker)


def _features(size: StepSize) -> Vector:
    sizes = (size.sequences, size.tokens, size.prompt_tokens, size.context_tokens)
    return _columns(*(np.asarray(number, np.float64) for number in sizes))


def _columns(sequences: Vector, tokens: Vector, prompt_tokens: Vector, context_tokens: Vector) -> Vector:
    """[..., num_features]"""
    constant = np.ones_like(tokens)
    columns = np.stack([constant, tokens, sequences, prompt_tokens, context_tokens], axis=-1)
    above = np.maximum(tokens[..., None] - _UP, 0.0)
    below = np.minimum(tokens[..., None], _DOWN)
    return np.concatenate([columns, above, below], axis=-1)
