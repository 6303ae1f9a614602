"""Share of a mixture's experts that a step reads, learned from steps that counted them. Torch-free."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from outrider.pace.regression import LinearCost, Vector
from outrider.pace.step import Step
from outrider.pace.tuning import TUNING

MAX_CHOSEN = 1.0 - 1e-9  # largest share of experts that a token chooses; the logarithm is infinite at 1


@dataclass(frozen=True)
class ExpertsRead:
    """Share of a mixture's experts that a step reads, as a function of the step's size.

    If n tokens choose k of E experts independently, a share of (1 - k / E)^n of the experts is not read.
    Similar tokens choose similar experts. So a further token of a sequence counts for less than an
    independent token, and so does a further sequence. The negative logarithm of the unread share is therefore
    modelled as linear, with these coefficients.
    """

    constant: float = 0.0
    of_sequence: float = 0.0
    of_token: float = 0.0

    @classmethod
    def independent(cls, chosen: float) -> "ExpertsRead":
        """Returns the model for tokens that choose independently. chosen: share that a token chooses."""
        return cls(of_token=-math.log1p(-min(chosen, MAX_CHOSEN)))

    def share(self, sequences: ArrayLike, tokens: ArrayLike) -> Vector:
        """Returns the shares for steps of at least one token; arguments broadcast.

        Args:
            sequences: sequences of a step.
            tokens: total tokens of a step.
        """
        left_out = self.constant + self.of_sequence * np.asarray(sequences, np.float64)
        return np.asarray(-np.expm1(-(left_out + self.of_token * np.asarray(tokens))))


NO_EXPERTS = ExpertsRead()


class LearnedExperts:
    """Experts that steps of a mixture read, learned from steps that counted them.

    If all steps had one size, tokens count as independent, because one share determines one coefficient only.
    """

    def __init__(self) -> None:
        self._left_out = LinearCost(TUNING.experts_reluctance)  # weights of constant, sequences, tokens

    @property
    def read(self) -> ExpertsRead:
        """Share as a function of a step's size; 0 for any size if no step has counted its experts."""
        return ExpertsRead(*map(float, self._left_out.weights))

    def observe(self, step: Step) -> None:
        """Learns from a step without prompts. A step that read nearly all experts is ignored as useless."""
        size = step.size
        if size.prompt_tokens or not 0.0 < step.experts_read <= TUNING.most_experts:
            return
        left_out = -math.log1p(-step.experts_read)
        features = np.array([1.0, size.sequences, size.tokens])
        self._left_out.observe(features, left_out, size.tokens, shows_slowness=False)
