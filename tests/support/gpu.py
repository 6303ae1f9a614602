"""A GPU for tests of the engine: the machine's own, or a simulated one."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from outrider.engine.forward.batch_invariant import PASS_TOKENS
from outrider.engine.loop.engine import Engine
from tests.support.simulated_cuda.counts import Counts
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


def left_empty(engine: Engine) -> Iterator[Engine]:
    """Yields an engine for a test, and closes its sequences afterwards: they must have freed all blocks."""
    yield engine
    for sequence in [*engine._sequences.values()]:
        engine.close(sequence)
    assert engine.load().free_blocks == engine.load().total_blocks


def counted(cuda: SimulatedCuda | None) -> SimulatedCuda:
    """Returns the simulated device with its counts at 0; on a real device the test is skipped."""
    if cuda is None:
        pytest.skip("only the simulated GPU counts waits")
    cuda.counts = Counts()
    return cuda
