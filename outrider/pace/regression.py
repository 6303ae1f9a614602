"""Least-squares fit of the relative error, over a stream of observations. Torch-free."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.learning.mean import kept
from outrider.pace.tuning import TUNING

Vector = NDArray[np.float64]
OUTLIER = math.log(TUNING.outlier_factor)
CHANGED = math.log(TUNING.changed_factor)


class LinearCost:
    """Linear model of seconds with non-negative weights, fitted by least squares of the relative error.

    An observation loses weight with each newer observation from its region of sizes. So regions that are no
    longer observed stay known. The fit is damped: weights change only as far as the observations determine
    them.

    A machine is slow for a while when other programs use it. Then steps of all sizes take longer, including
    sizes that are not observed meanwhile. One factor for all sizes follows the machine within a few
    observations. The error of a time changes this factor if its region was observed recently. It changes the
    weights if the region was not.
    """

    def __init__(self, regularization: Sequence[float]) -> None:
        """regularization: [num_features] damping. Of interchangeable features, the least damped counts."""
        num_features = len(regularization)
        self._reluctance = np.array(regularization)
        self._products = np.zeros((TUNING.size_regions, num_features, num_features))
        self._sums = np.zeros((TUNING.size_regions, num_features))
        self._weights = np.zeros(num_features)
        self._counts = np.zeros(TUNING.size_regions)  # recent observations of each region
        self._off = np.zeros(TUNING.size_regions, np.int64)  # consecutive far too long times; < 0: too short
        self._slowness = 0.0  # logarithm of the factor by which all times are longer at present
        self._unfitted = 0  # observations since the last fit
        self.samples = 0
        self.has_seen = np.zeros(num_features, bool)  # features that were above 0 in some observation
        self.shortest_s = 0.0  # shortest observed time; 0: no observation yet

    def observe(self, features: Vector, seconds: float, size: float, *, shows_slowness: bool = True) -> None:
        """Learns from one timing.

        Args:
            features: [num_features]
            seconds: measured time; 0 and less are ignored.
            size: size that selects the region; there is a region for each doubling.
            shows_slowness: whether the error of the time may be due to a slow machine.
        """
        if seconds <= 0.0:
            return
        self.has_seen |= features > 0.0
        self.shortest_s = min(self.shortest_s or seconds, seconds)
        region = min(int(np.log2(max(size, 1.0))), TUNING.size_regions - 1)
        share = kept(TUNING.region_memory)
        expected = seconds
        if self.samples >= TUNING.fit_after:
            if self._unfitted >= TUNING.fit_every or self.samples == TUNING.fit_after:
                self._fit()
            # A fit to prompts alone, for example, predicts nothing about decoding and cannot judge it.
            if (fitted := float(features @ self._weights)) > 0.0:
                seconds /= math.exp(self._slowness)
                expected = max(fitted, self.shortest_s / TUNING.outlier_factor)
                error = math.log(seconds / expected)
                error = min(max(error, -OUTLIER), OUTLIER)
                known = shows_slowness * self._counts[region] / (self._counts[region] + TUNING.known_times)
                slower = known * self._slower(region, error)
                self._slowness += slower
                seconds = expected * math.exp(error - slower)
        relative = features / expected
        self._products[region] = share * self._products[region] + np.outer(relative, relative)
        self._sums[region] = share * self._sums[region] + relative * (seconds / expected)
        self._counts *= share
        self._counts[region] += shows_slowness
        self.samples += 1
        self._unfitted += 1

    def _slower(self, region: int, error: float) -> float:
        """Returns the logarithm of the factor by which the machine seems to have become slower.

        A single time may be off by chance. After several times in a row, the machine counts as changed. The
        region is learned anew if it was not observed recently.
        """
        direction = int(error > CHANGED) - int(error < -CHANGED)
        same = direction == np.sign(self._off[region])
        self._off[region] = self._off[region] + direction if same else direction
        if abs(self._off[region]) < TUNING.changed_times:
            most = TUNING.slowness_error
            return min(max(error, -most), most) / TUNING.slowness_memory
        self._off[region] = 0
        if self._counts[region] < TUNING.known_times:
            self._products *= TUNING.changed_weight
            self._sums *= TUNING.changed_weight
            self._products[region] = self._sums[region] = 0.0
        return error

    @property
    def weights(self) -> Vector:
        """Weights at the machine's present speed: [num_features]; 0 before the first observation."""
        if self._unfitted:
            self._fit()
        return math.exp(self._slowness) * self._weights

    def _fit(self) -> None:
        """Solves the damped normal equations, without the features whose weight would be negative."""
        products, sums = self._products.sum(axis=0), self._sums.sum(axis=0)
        damping = np.diag(TUNING.damping * self._reluctance * products.diagonal() + 1e-12)
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
