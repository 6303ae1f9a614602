"""A GPU for tests of the engine: the machine's own, or a simulated one."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from outrider.engine.forward.batch_invariant import PASS_TOKENS
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import simulated_cuda


@contextmanager
def gpu() -> Iterator[SimulatedCuda | None]:
    """Yields the simulated device, which knows what was launched; None where the machine has a real one."""
    if torch.cuda.is_available():
        yield None
    else:
        # Triton's interpreter takes seconds for a pass of as many tokens as a GPU likes.
        with simulated_cuda() as cuda, patch.dict(PASS_TOKENS, {"cuda": 16}):
            yield cuda
