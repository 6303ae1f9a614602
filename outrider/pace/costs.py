"""What a forward pass and the messages of a round cost, fitted to timings as they come in. Torch-free."""

from collections import OrderedDict
from copy import deepcopy

import numpy as np
from numpy.typing import ArrayLike

from outrider.drafters.registry import DrafterInfo
from outrider.pace.regression import CHANGED, ENOUGH_SAMPLES, OUTLIER, LinearCost, Vector
from outrider.pace.step import Step, StepSize

HINGES_UP = (8, 16, 32, 64, 128, 256, 512)  # tokens; from each on a token more may cost more
HINGES_DOWN = (16, 64, 192)  # tokens; from each on a token more may cost less, as on some processors
_UP, _DOWN = np.array(HINGES_UP, np.float64), np.array(HINGES_DOWN, np.float64)
MOST_TOKENS = 1 << 20  # tokens of a step
_BENDS = np.unique([0.0, *HINGES_UP, *HINGES_DOWN, MOST_TOKENS])  # between two of them costs are a line
TOKENS, SEQUENCES, CONTEXT = 1, 2, 4  # columns of the features
HIDDEN_FORGETTING = 0.02  # weight of the newest round in the share of draft time that is hidden
PRIOR_HIDDEN, PRIOR_VERDICTS = 0.6, 8.0  # that share before it is measured, and its weight in verdicts
LEAST_ROUND_S = 2e-4  # seconds
MOST_WORKERS = 64  # workers of one drafter that are remembered


class StepCost:
    """Seconds of a forward pass: linear in pieces.

    Where reading the weights takes longest it hides the first tokens; where products of few rows are slow the
    first cost most.
    """

    def __init__(self) -> None:
        # Reading the weights comes first, then a cost per token; bends need evidence.
        self._cost = LinearCost([1e-3, 0.1, 1.0, 1.0, 1.0, *[1.0] * len(HINGES_UP + HINGES_DOWN)])
        self._newest = 0
        self._weights = self._cost.weights
        self._at_bends = np.zeros_like(_BENDS)  # seconds by tokens alone, under those weights

    @property
    def is_known(self) -> bool:
        return self._cost.samples >= ENOUGH_SAMPLES

    def observe(self, step: Step) -> bool:
        """Learns from a step, once though several report it; False: it was known."""
        if step.number == self._newest:
            return False
        self._newest = step.number
        self._cost.observe(_features(step.size), step.seconds, step.size.tokens)
        return True

    def seconds(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike = 0.0) -> Vector:
        """Seconds of passes without prompts; arguments broadcast. None is far below the shortest one seen."""
        return np.asarray(
            np.maximum(self._fitted(sequences, tokens, context_tokens), self._cost.shortest_s / OUTLIER)
        )

    def measured(self, sequences: float, context_tokens: float) -> float | None:
        """Seconds of a pass of plain decoding for so many sequences; None as long as that is not known.

        It is not known before a pass has decoded, nor if the fit says far less than the shortest pass took.
        """
        if not self.is_known or not self._cost.has_seen[TOKENS]:
            return None
        seconds = float(self._fitted(sequences, sequences, context_tokens))
        return seconds if seconds >= self._cost.shortest_s / CHANGED else None

    def _fitted(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike) -> Vector:
        weights = self._cost.weights
        if weights is not self._weights:
            self._weights = weights
            none = np.zeros_like(_BENDS)
            self._at_bends = _columns(none, _BENDS, none, none) @ weights
        # A decision asks some thirty times: a look at the bends takes a tenth of a product of features.
        seconds = np.interp(np.asarray(tokens, np.float64), _BENDS, self._at_bends)
        seconds = seconds + weights[SEQUENCES] * np.asarray(sequences)
        return np.asarray(seconds + weights[CONTEXT] * np.asarray(context_tokens))


class RoundCost:
    """Seconds of a round outside of draft and target, by how many sequences are in rounds."""

    def __init__(self) -> None:
        self._cost = LinearCost([1e-3, 1.0])

    def observe(self, sequences: int, seconds: float) -> None:
        """Of one sequence's round."""
        self._cost.observe(np.array([1.0, sequences]), seconds, sequences)

    def seconds(self, sequences: ArrayLike) -> Vector:
        constant, per_sequence = self._cost.weights
        return np.asarray(constant + per_sequence * np.asarray(sequences))


class DrafterCost:
    """What one drafter takes at one worker, apart from the target.

    Draft-ahead hides a share of the time, but never more than the target's own step lasts.
    """

    def __init__(self, drafter: DrafterInfo) -> None:
        self._drafter = drafter
        self.step = StepCost()
        self.round = RoundCost()
        self._hidden = 0.0  # of the time that could be hidden, the share that was
        self._verdicts = 0.0  # by which that is known; 0: Drafts are not prepared there

    def observe_ahead(
        self, sequences: int, depth: int, seconds: float, target_step_s: float, ahead_hit: bool
    ) -> None:
        """A round, from a Verdict to the next Verify, where Drafts are prepared."""
        if not self._verdicts:
            self._hidden, self._verdicts = PRIOR_HIDDEN, PRIOR_VERDICTS
        alone = float(self._alone(sequences, depth))
        hidden = (alone - seconds) / max(min(alone, target_step_s), LEAST_ROUND_S) if ahead_hit else 0.0
        self._verdicts = min(self._verdicts + 1.0, 1.0 / HIDDEN_FORGETTING)
        self._hidden += (min(max(hidden, 0.0), 1.0) - self._hidden) / self._verdicts

    def seconds(self, sequences: Vector, depth: Vector, leaves: Vector, target_step: Vector) -> Vector:
        """From a Verdict to the next Verify, where the target's step takes so many seconds.

        leaves: nodes beside chains, all together, that it feeds too.
        """
        alone = self._alone(sequences, depth, leaves)
        return np.asarray(alone - self._hidden * np.minimum(alone, target_step))

    def _alone(self, sequences: ArrayLike, depth: ArrayLike, leaves: ArrayLike = 0.0) -> Vector:
        return self.round.seconds(sequences) + self._steps(sequences, depth, leaves)

    def _steps(self, sequences: ArrayLike, depth: ArrayLike, leaves: ArrayLike) -> Vector:
        drafter = self._drafter
        steps = drafter.steps_per_draft + drafter.steps_per_token * np.asarray(depth)
        positions = np.maximum(depth, 1) if drafter.is_parallel else np.ones(())
        tokens = np.multiply(sequences, positions) + np.asarray(leaves) / np.maximum(depth, 1)
        return np.asarray(steps * self.step.seconds(sequences, tokens))


class DrafterCosts:
    """What one drafter takes at each of its workers."""

    def __init__(self, drafter: DrafterInfo) -> None:
        self._drafter = drafter
        self._of_worker: OrderedDict[str, DrafterCost] = OrderedDict()  # the last one was asked for last

    def of(self, worker: str) -> DrafterCost:
        """One that was never heard of is taken to be like another.

        worker: its address; empty: any, or the drafter has none of its own.
        """
        known = next(reversed(self._of_worker.values()), None)
        if known is not None and not worker:
            return known
        if worker not in self._of_worker:
            self._of_worker[worker] = DrafterCost(self._drafter) if known is None else deepcopy(known)
        self._of_worker.move_to_end(worker)
        if len(self._of_worker) > MOST_WORKERS:
            self._of_worker.popitem(last=False)
        return self._of_worker[worker]


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
