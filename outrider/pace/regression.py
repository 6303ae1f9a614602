"""Least squares of the relative error, over observations that come one by one. Torch-free."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

REGIONS = 16  # regions of sizes; the last one has no end
ENOUGH_SAMPLES = 16  # observations before a fit is used
FITTED_FOR = 8  # observations that are compared with one fit: a new fit takes longer than a step's other work
CHANGED, OFTEN = 1.5, 4  # a machine that is off by this factor, this many times in a row, has changed
FADED = 0.1  # weight of what was observed before the machine changed
DAMPING = 0.02  # weight of the present weights, as a share of the observations'
OUTLIER = 4.0  # factor; a time that is further off counts as if it was off by this factor


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
