"""What a forward pass and a round's ways cost, fitted to timings as they come in. Torch-free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]

KNEES = (8, 16, 32, 64, 128, 256, 512)  # tokens at which a step may begin to cost more per token
ENOUGH_SAMPLES = 16.0
SHORTEST_S = 1e-9  # of a pass, also before anything was observed
OUTLIER = 2.0  # a time further off than by this factor counts as if it were just so far off


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

    Older observations are forgotten. The weights move from where they are by coordinate descent, so what the
    newer observations do not tell apart stays as it was.
    """

    def __init__(self, num_features: int, memory: float = 100.0) -> None:
        """memory: observations after which an older one weighs 1/e."""
        self._products = np.zeros((num_features, num_features))
        self._sums = np.zeros(num_features)
        self._weights = np.zeros(num_features)
        self._memory = memory
        self._is_fitted = True
        self.samples = 0.0  # forgotten ones excluded

    def observe(self, features: Vector, seconds: float, weight: float = 1.0) -> None:
        """
        Args:
            features: [num_features]
            seconds: what it took; 0 and less are ignored.
            weight: of this observation, as a count.
        """
        if seconds <= 0.0:
            return
        if self.samples >= ENOUGH_SAMPLES:
            expected = float(self.seconds(features))
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        kept = 1.0 - weight / self._memory
        relative = features / seconds
        self._products = kept * self._products + weight * np.outer(relative, relative)
        self._sums = kept * self._sums + weight * relative
        self.samples = kept * self.samples + weight
        self._is_fitted = False

    def seconds(self, features: Vector) -> Vector:
        """[...] for features [..., num_features]; 0 before the first observation."""
        if not self._is_fitted:
            self._fit()
        return np.asarray(features @ self._weights)

    def _fit(self, sweeps: int = 8) -> None:
        for _ in range(sweeps):
            for feature in np.flatnonzero(self._products.diagonal()):
                gradient = self._sums[feature] - self._products[feature] @ self._weights
                moved = self._weights[feature] + gradient / self._products[feature, feature]
                self._weights[feature] = max(0.0, moved)
        self._is_fitted = True


class StepCost:
    """Seconds of a forward pass: convex in its tokens, since reading the weights hides the first of them."""

    def __init__(self) -> None:
        self._cost = LinearCost(5 + len(KNEES))
        self._newest = 0

    @property
    def is_known(self) -> bool:
        return self._cost.samples >= ENOUGH_SAMPLES

    def observe(self, step: Step) -> bool:
        """Learns from a step, once though several report it; False: it was known."""
        if step.number == self._newest:
            return False
        self._newest = step.number
        self._cost.observe(_features(step.size), step.seconds)
        return True

    def seconds(self, sequences: ArrayLike, tokens: ArrayLike, context_tokens: ArrayLike = 0.0) -> Vector:
        """Of passes without prompts; arguments broadcast."""
        sizes = np.broadcast_arrays(sequences, tokens, 0.0, context_tokens)
        seconds = self._cost.seconds(_columns(*(np.asarray(size, np.float64) for size in sizes)))
        return np.maximum(seconds, SHORTEST_S)


class RoundCost:
    """Seconds of a round outside of draft and target, by how many sequences are in rounds."""

    def __init__(self) -> None:
        self._cost = LinearCost(2)

    def observe(self, sequences: int, seconds: float) -> None:
        """One sequence's round counts as the share that it is of all."""
        self._cost.observe(np.array([1.0, sequences]), seconds, 1.0 / max(sequences, 1))

    def seconds(self, sequences: ArrayLike) -> Vector:
        count = np.asarray(sequences, np.float64)
        return self._cost.seconds(np.stack([np.ones_like(count), count], axis=-1))


def _features(size: StepSize) -> Vector:
    sizes = (size.sequences, size.tokens, size.prompt_tokens, size.context_tokens)
    return _columns(*(np.asarray(number, np.float64) for number in sizes))


def _columns(sequences: Vector, tokens: Vector, prompt_tokens: Vector, context_tokens: Vector) -> Vector:
    """[..., num_features]"""
    beyond = [np.maximum(tokens - knee, 0.0) for knee in KNEES]
    constant = np.ones_like(tokens)
    return np.stack([constant, tokens, sequences, prompt_tokens, context_tokens, *beyond], axis=-1)
