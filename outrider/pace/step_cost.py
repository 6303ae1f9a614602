"""Cost of a forward pass, learned from the passes that workers report. Torch-free."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from outrider.pace.experts import LearnedExperts
from outrider.pace.regression import LinearCost, Vector
from outrider.pace.step import Step
from outrider.pace.tuning import TUNING

_UP, _DOWN = np.array(TUNING.hinges_up, np.float64), np.array(TUNING.hinges_down, np.float64)
_BENDS = np.unique([0.0, *_UP, *_DOWN, TUNING.most_tokens])  # tokens; between two of them costs are a line
_NONE = np.zeros_like(_BENDS)
TOKENS, SEQUENCES, CONTEXT, EXPERTS = 1, 2, 4, 5  # columns of the features


class StepCost:
    """Seconds of a forward pass: linear in pieces, and in the share of a mixture's experts that it reads.

    If reading the weights takes longest, it hides the first tokens. If products of few rows are slow, the
    first tokens cost most. Tokens of a mixture read ever fewer experts that were not read yet.
    """

    def __init__(self, surveyed: Sequence[Step] = ()) -> None:
        """surveyed: steps that the worker timed before it served."""
        # Constant, tokens, sequences, prompt tokens, context, experts; then the bends, which need evidence.
        self._learned = LinearCost([*TUNING.step_reluctance, *np.ones(len(_UP) + len(_DOWN))])
        self._experts = LearnedExperts()
        self._unlearned: list[Step] = []  # steps that were observed since the cost was last asked for
        self._newest = 0
        for step in surveyed:
            self.observe(step)

    @property
    def is_known(self) -> bool:
        return self._cost.samples >= TUNING.fit_after

    def observe(self, step: Step) -> bool:
        """Learns from a step, once though several sequences report it; False: it was known.

        A busy gateway reads several replies of one sequence, and then those of the next sequence. A worker
        that was started anew counts from 1, so a number far below the newest is a new step too.

        It learns from several at a time: each alone, between two tokens, would find cold caches.
        """
        if 0 <= self._newest - step.number < TUNING.recent_steps:
            return False
        self._newest = step.number
        self._unlearned.append(step)
        if len(self._unlearned) == TUNING.fit_every:
            self._learn()
        return True

    def restart(self) -> None:
        """Lets steps of another worker follow, which counts from 1."""
        self._newest = 0

    @property
    def _cost(self) -> LinearCost:
        """The cost with all that was observed."""
        self._learn()
        return self._learned

    def _learn(self) -> None:
        for step in self._unlearned:
            size = step.size
            is_decoding = size.prompt_tokens == 0.0  # prompts of all sizes share the regions of few tokens
            self._learned.observe(_features(step), step.seconds, size.tokens, shows_slowness=is_decoding)
            self._experts.observe(step)
        self._unlearned.clear()

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
        # A decision asks some thirty times: interpolation takes a tenth of the time of a product of features.
        seconds = np.interp(np.asarray(tokens, np.float64), _BENDS, _AT_BENDS @ weights)
        seconds = seconds + weights[SEQUENCES] * np.asarray(sequences)
        seconds = seconds + weights[CONTEXT] * np.asarray(context_tokens)
        if weights[EXPERTS]:
            seconds = seconds + weights[EXPERTS] * self._experts.read.share(sequences, tokens)
        return np.asarray(seconds)


def _features(step: Step) -> Vector:
    size = step.size
    sizes = (size.sequences, size.tokens, size.prompt_tokens, size.context_tokens, step.experts_read)
    return _columns(*(np.asarray(number, np.float64) for number in sizes))


def _columns(
    sequences: Vector, tokens: Vector, prompt_tokens: Vector, context_tokens: Vector, experts: Vector
) -> Vector:
    """[..., num_features]"""
    constant = np.ones_like(tokens)
    columns = np.stack([constant, tokens, sequences, prompt_tokens, context_tokens, experts], axis=-1)
    above = np.maximum(tokens[..., None] - _UP, 0.0)
    below = np.minimum(tokens[..., None], _DOWN)
    return np.concatenate([columns, above, below], axis=-1)


# [bends, num_features] features of passes with that many tokens and nothing else
_AT_BENDS = _columns(_NONE, _BENDS, _NONE, _NONE, _NONE)
