"""Sampling settings that apply to a whole row of logits, as numbers for the kernels that choose tokens."""

import math

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.settings import Sampling

TOP_K, HAS_NOISE, TEMPERATURE, TOP_P, LOG_MIN_P = range(5)  # indices into a row's numbers
_LARGEST_TOP_K = 2**31 - 1


def row_settings(sampling: Sampling) -> NDArray[np.float64]:
    """Returns float64 [5]; temperature 0 becomes top_k 1 for verification rules that use distributions."""
    if sampling.temperature == 0.0:
        return np.array([sampling.verification != "coupled", False, 1.0, 1.0, -math.inf])
    distance = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    top_k = min(sampling.top_k, _LARGEST_TOP_K)
    return np.array([top_k, True, sampling.temperature, sampling.top_p, distance])
