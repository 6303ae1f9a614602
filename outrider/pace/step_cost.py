"""Cost of a forward pass, learned from the passes that workers report. Torch-free."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from outrider.learning.mean import Rate
from outrider.pace.experts import LearnedExperts
from outrider.pace.regression import LinearCost, Vector
from outrider.pace.step import Step
from outrider.pace.tuning import TUNING

_UP, _DOWN = np.array(TUNING.hinges_up, np.float64), np.array(TUNING.hinges_down, np.float64)
_BENDS = np.unique([0.0, *_UP, *_DOWN, TUNING.most_tokens])  # tokens; the cost is linear between two bends
_NONE = np.zeros_like(_BENDS)
TOKENS, SEQUENCES, CONTEXT, EXPERTS, HOST = 1, 2, 4, 5, 6  # columns of the features


class StepCost:
    """Seconds of a forward pass: piecewise linear in tokens, and linear in the share of experts it reads.

    If reading the weights dominates, the first tokens cost almost nothing. If matrix products with few rows
    are slow, the first tokens cost most. In a mixture of experts, each further token reads fewer new experts.

    A pass that a device launches late, after the host has read the tokens of the previous pass, takes longer.
    Rounds wait for the host far more often than plain decoding, so their shares are learned apart.
    """

    def __init__(self, surveyed: Sequence[Step] = ()) -> None:
        """surveyed: steps that the worker timed before it served."""
        # Constant, tokens, sequences, prompts, context, experts, host; then the bends, with strong damping.
        self._learned = LinearCost([*TUNING.step_reluctance, *np.ones(len(_UP) + len(_DOWN))])
        self._experts = LearnedExperts()
        # Share of passes that wait for the host, of plain decoding and of rounds.
        self._waiting = Rate(TUNING.region_memory), Rate(TUNING.region_memory)
        self._unlearned: list[Step] = []  # observed steps that are not in the fit yet
        self._newest = 0
        for step in surveyed:
            self.observe(step)

    @property
    def is_known(self) -> bool:
        return self._cost.samples >= TUNING.fit_after

    def observe(self, step: Step) -> bool:
        """Learns from a step; returns False if another sequence has already reported it.

        A busy gateway reads several replies of one sequence, and then those of the next sequence. So numbers
        are not ascending. A restarted worker counts from 1, so a number far below the newest is a new step.

        Several steps are learned at a time: a single update between two tokens would find cold CPU caches.
        """
        if 0 <= self._newest - step.number < TUNING.recent_steps:
            return False
        self._newest = step.number
        self._unlearned.append(step)
        if len(self._unlearned) == TUNING.fit_every:
            self._learn()
        return True

    def restart(self) -> None:
        """Prepares for steps of another worker, whose numbers begin at 1."""
        self._newest = 0

    @property
    def _cost(self) -> LinearCost:
        """Cost that includes all observed steps."""
        self._learn()
        return self._learned

    def _learn(self) -> None:
        for step in self._unlearned:
            size = step.size
            is_decoding = size.prompt_tokens == 0.0  # prompts of all sizes fall in the regions of few tokens
            self._learned.observe(_features(step), step.seconds, size.tokens, shows_slowness=is_decoding)
            self._experts.observe(step)
            if is_decoding:
                self._waiting[size.tokens > size.sequences].observe(not step.is_early)
        self._unlearned.clear()

    def seconds(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike = 0.0) -> Vector:
        """Returns seconds of passes without prompts, not far below the shortest pass; arguments broadcast."""
        shortest_s = self._cost.shortest_s / TUNING.outlier_factor
        return np.asarray(np.maximum(self._fitted(sequences, tokens, context_tokens), shortest_s))

    def measured(self, sequences: float, context_tokens: float) -> float | None:
        """Returns the seconds of a pass of plain decoding for that many sequences; None: not known yet.

        It is not known before a decoding pass was observed, or if the fit is far below the shortest pass.
        """
        if not self.is_known or not self._cost.has_seen[TOKENS]:
            return None
        seconds = float(self._fitted(sequences, sequences, context_tokens))
        return seconds if seconds >= self._cost.shortest_s / TUNING.changed_factor else None

    def _fitted(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike) -> Vector:
        weights = self._cost.weights
        # A decision needs about thirty of these; interpolation is ten times as fast as a product of features.
        seconds = np.interp(np.asarray(tokens, np.float64), _BENDS, _AT_BENDS @ weights)
        seconds = seconds + weights[SEQUENCES] * np.asarray(sequences)
        seconds = seconds + weights[CONTEXT] * np.asarray(context_tokens)
        if weights[EXPERTS]:
            seconds = seconds + weights[EXPERTS] * self._experts.read.share(sequences, tokens)
        if weights[HOST]:
            plain, rounds = (share.value(prior=1.0) for share in self._waiting)
            seconds = seconds + weights[HOST] * np.where(np.greater(tokens, sequences), rounds, plain)
        return np.asarray(seconds)


def _features(step: Step) -> Vector:
    size = step.size
    sizes = (size.sequences, size.tokens, size.prompt_tokens, size.context_tokens)
    numbers = (*sizes, step.experts_read, not step.is_early)
    return _columns(*(np.asarray(number, np.float64) for number in numbers))


def _columns(
    sequences: Vector,
    tokens: Vector,
    prompt_tokens: Vector,
    context_tokens: Vector,
    experts: Vector,
    waits: Vector,
) -> Vector:
    """Returns the features of passes: [..., num_features]."""
    constant = np.ones_like(tokens)
    sizes = [constant, tokens, sequences, prompt_tokens, context_tokens]
    columns = np.stack([*sizes, experts, waits], axis=-1)
    above = np.maximum(tokens[..., None] - _UP, 0.0)
    below = np.minimum(tokens[..., None], _DOWN)
    return np.concatenate([columns, above, below], axis=-1)


# [bends, num_features] features of passes with that many tokens and nothing else
_AT_BENDS = _columns(_NONE, _BENDS, _NONE, _NONE, _NONE, _NONE)
