"""Compiled CPU functions, which some tests need."""

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.cpu.functions import compiled

needs_functions = pytest.mark.skipif(compiled() is None, reason="no compiled functions on this machine")


def are_equal(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are bitwise equal; without compiled functions, equal up to rounding.

    A matrix product of torch sums each row in an order that depends on the number of rows.
    """
    if compiled() is None:
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    return torch.equal(found, expected)
