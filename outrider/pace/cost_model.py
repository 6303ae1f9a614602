"""What a forward pass and the messages of a round cost, fitted to timings as they come in. Torch-free."""

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.drafters.registry import DrafterInfo

Vector = NDArray[np.float64]

HINGES_UP = (
    8,
    16,
    32,
    64,
    128,
    256,
    512,
)  # hinge points, tokens: from there on one more may cost more
HINGES_DOWN = (16, 64, 192)  # and less: products of few rows are slow on some processors
_UP, _DOWN = np.array(HINGES_UP, np.float64), np.array(HINGES_DOWN, np.float64)
MOST_TOKENS = 1 << 20  # of a step
_BENDS = np.unique([0.0, *HINGES_UP, *HINGES_DOWN, MOST_TOKENS])  # in between the cost is a straight line
TOKENS, SEQUENCES, CONTEXT = 1, 2, 4  # columns of the features
REGIONS = 16  # of sizes, the last one without an end
ENOUGH_SAMPLES = 16
FITTED_FOR = 8  # observations that are compared with one fit: it takes longer than all else about a step
CHANGED, OFTEN = 1.5, 4  # a machine that is off by this factor so many times in a row has changed
FADED = 0.1  # weight of what was observed before it changed
DAMPING = 0.02  # weight of where the weights are, as a share of the observations'
HIDDEN_FORGETTING = 0.02  # weight of the newest round in the share of draft time that is hidden
PRIOR_HIDDEN, PRIOR_VERDICTS = 0.6, 8.0  # that share before it is measured, and with what weight
LEAST_ROUND_S = 2e-4
MOST_WORKERS = 64  # of one drafter that are remembered
OUTLIER = 4.0  # a time further off than by this factor counts as if it were just so far off


@dataclass(frozen=True)
class StepSize:
    """How much one forward pass has to do."""

    sequences: float
    tokens: float  # decoded and verified
    prompt_tokens: float = 0.0  # of prompts that are taken in meanwhile
    context_tokens: float = 0.0  # cached ones that its sequences look back at, all together


@dataclass(frozen=True)
class Step:
    """One forward pass, as each of its sequences reports it."""

    number: int  # of the worker's passes
    size: StepSize
    seconds: float  # from building the batch to token ids on the host


class LinearCost:
    """Seconds as a sum of features with weights of at least 0: least squares of the relative error.

    Observations are forgotten as newer ones come from the same region of sizes: what is not seen any more
    stays known. The weights are held back a little where they are, so what the observations do not tell apart
    stays as it was.
    """

    def __init__(self, regularization: Sequence[float], memory: float = 50.0) -> None:
        """
        Args:
            regularization: [num_features] how much each is held back. What several could explain goes to the
                least reluctant.
            memory: observations of one region after which an older one weighs 1/e.
        """
        num_features = len(regularization)
        self._reluctance = np.array(regularization)
        self._products = np.zeros((REGIONS, num_features, num_features))
        self._sums = np.zeros((REGIONS, num_features))
        self._weights = np.zeros(num_features)
        self._off = np.zeros(REGIONS, np.int64)  # observations in a row that were far too high, or low: < 0
        self._memory = memory
        self._unfitted = 0  # observations since the weights were solved for
        self.samples = 0
        self.has_seen = np.zeros(num_features, bool)  # features that some observation had
        self.shortest_s = 0.0  # time that was observed; 0 before the first

    def observe(self, features: Vector, seconds: float, size: float) -> None:
        """
        Args:
            features: [num_features]
            seconds: what it took; 0 and less are ignored.
            size: by which regions are told apart, one for each doubling.
        """
        if seconds <= 0.0:
            return
        self.has_seen |= features > 0.0
        self.shortest_s = min(self.shortest_s or seconds, seconds)
        expected = seconds
        if self.samples >= ENOUGH_SAMPLES:
            if self._unfitted >= FITTED_FOR or self.samples == ENOUGH_SAMPLES:
                self._fit()
            # A fit that says nothing of it, as of decoding after prompts alone, is not what it is judged by.
            if (fitted := float(features @ self._weights)) > 0.0:
                expected = max(fitted, self.shortest_s / OUTLIER)
                seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        region = min(int(np.log2(max(size, 1.0))), REGIONS - 1)
        self._notice_change(region, seconds / expected)
        kept = 1.0 - 1.0 / self._memory
        relative = features / expected
        self._products[region] = kept * self._products[region] + np.outer(relative, relative)
        self._sums[region] = kept * self._sums[region] + relative * (seconds / expected)
        self.samples += 1
        self._unfitted += 1

    def _notice_change(self, region: int, error: float) -> None:
        """A machine that is far off again and again has changed: what it was before is all but forgotten."""
        direction = int(error > CHANGED) - int(error < 1.0 / CHANGED)
        same = direction == np.sign(self._off[region])
        self._off[region] = self._off[region] + direction if same else direction
        if abs(self._off[region]) >= OFTEN:
            self._off[region] = 0
            self._products *= FADED
            self._sums *= FADED
            self._products[region] = self._sums[region] = 0.0

    @property
    def weights(self) -> Vector:
        """[num_features] the same array until something new was observed; 0 before the first observation."""
        if self._unfitted:
            self._fit()
        return self._weights

    def _fit(self) -> None:
        """Solves the damped normal equations, without the features whose weight would be negative."""
        products, sums = self._products.sum(axis=0), self._sums.sum(axis=0)
        damping = np.diag(DAMPING * self._reluctance * products.diagonal() + 1e-12)
        sums = sums + damping @ self._weights
        products = products + damping
        free = np.ones(len(sums), bool)
        weights = np.zeros(len(sums))
        while free.any():
            weights[free] = np.linalg.solve(products[np.ix_(free, free)], sums[free])
            if (weights[free] >= 0.0).all():
                break
            free &= weights > 0.0
            weights[~free] = 0.0
        self._weights = weights
        self._unfitted = 0


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
