"""A GPU for tests of the engine: the machine's GPU, or a simulated GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from outrider.engine.forward.batch_invariant import PASS_TOKENS
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import simulated_cuda


@contextmanager
def gpu() -> Iterator[SimulatedCuda | None]:
    """Yields the simulated device, which counts launches; None if the machine has a real GPU."""
    if torch.cuda.is_available():
        yield None
    else:
        # A pass of the usual number of tokens takes seconds in Triton's interpreter.
        with simulated_cuda() as cuda, patch.dict(PASS_TOKENS, {"cuda": 16}):
            yield cuda


def draft_of(folder: Path, device: str, **fields: Any) -> Engine:
    """Returns the engine of a small draft in float32."""
    return Engine.from_settings(
        EngineSettings(
            model=str(folder),
            device=device,
            dtype="float32",
            block_size=8,
            cache_memory=2**22,
            self_check=False,
            is_draft=True,
            **fields,
        )
    )


def left_empty(engine: Engine) -> Iterator[Engine]:
    """Yields an engine for a test, then closes its sequences and asserts that all blocks are free."""
    yield engine
    for sequence in [*engine._sequences.values()]:
        engine.close(sequence)
    assert engine.load().free_blocks == engine.load().total_blocks


def counted(cuda: SimulatedCuda | None) -> SimulatedCuda:
    """Returns the simulated device with its counts reset; skips the test on a real device."""
    if cuda is None:
        pytest.skip("only the simulated GPU counts waits")
    cuda.counts = Counts()
    return cuda
