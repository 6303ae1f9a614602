"""Share of a mixture's experts that a step reads, learned from steps that counted them. Torch-free."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from outrider.pace.regression import LinearCost, Vector
from outrider.pace.step import Step
from outrider.pace.tuning import TUNING

MOST_CHOSEN = 1.0 - 1e-9  # share that a token chooses; a model whose tokens choose all has no logarithm


@dataclass(frozen=True)
class ExpertsRead:
    """Share of a mixture's experts that a step reads, by its size.

    Tokens that choose k of E experts independently leave out (1 - k / E)^n of them. Alike tokens leave out
    more, so a further token of a sequence counts for less than a token, and so does a further sequence. The
    negative logarithm of what is left out is therefore linear: these are its coefficients.
    """

    constant: float = 0.0
    of_sequence: float = 0.0
    of_token: float = 0.0

    @classmethod
    def independent(cls, chosen: float) -> "ExpertsRead":
        """Returns the share if all tokens choose independently. chosen: share that a token chooses."""
        return cls(of_token=-math.log1p(-min(chosen, MOST_CHOSEN)))

    def share(self, sequences: ArrayLike, tokens: ArrayLike) -> Vector:
        """Returns the shares of steps of at least a token; arguments broadcast.

        Args:
            sequences: sequences of a step.
            tokens: tokens of a step, all together.
        """
        left_out = self.constant + self.of_sequence * np.asarray(sequences, np.float64)
        return np.asarray(-np.expm1(-(left_out + self.of_token * np.asarray(tokens))))


NO_EXPERTS = ExpertsRead()


class LearnedExperts:
    """Experts that steps of a mixture read, learned from steps that counted them.

    After steps of one size alone, tokens count as independent: the share that they read says no more.
    """

    def __init__(self) -> None:
        self._left_out = LinearCost(TUNING.experts_reluctance)  # constant, sequences, tokens

    @property
    def read(self) -> ExpertsRead:
        """Share by the size of a step; 0 for any size if no step has counted."""
        return ExpertsRead(*map(float, self._left_out.weights))

    def observe(self, step: Step) -> None:
        """Learns from a step without prompts. A step that read nearly all experts tells little."""
        size = step.size
        if size.prompt_tokens or not 0.0 < step.experts_read <= TUNING.most_experts:
            return
        left_out = -math.log1p(-step.experts_read)
        features = np.array([1.0, size.sequences, size.tokens])
        self._left_out.observe(features, left_out, size.tokens, shows_slowness=False)
