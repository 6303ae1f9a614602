"""A GPU for tests of the engine: the machine's own, or a simulated one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import simulated_cuda


@contextmanager
def gpu() -> Iterator[SimulatedCuda | None]:
    """Yields the simulated device, which knows what was launched; None where the machine has a real one."""
    if torch.cuda.is_available():
        yield None
    else:
        with simulated_cuda() as cuda:
            yield cuda
