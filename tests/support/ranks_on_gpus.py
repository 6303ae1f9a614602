"""Common parts of ranks with simulated GPUs: tests/support/simulated_cuda/README.md."""

from typing import Any
from unittest.mock import patch

import outrider.engine.forward.graphs
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.loop.follower import follow
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.tensor import SimulatedTensor


def few_graphs() -> Any:
    return patch.object(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 8))


def follow_on(group: RankGroup, settings: EngineSettings) -> int:
    """Follows rank 0, and returns how often this rank waited for its device."""
    with few_graphs():
        forward = load_forward_pass(settings, group, TargetDrafters.of(settings))
    cuda = simulated()
    cuda.counts = Counts()
    follow(forward, group)
    return cuda.counts.waits.total()


def simulated() -> SimulatedCuda:
    """Returns the simulated GPU of this process."""
    assert isinstance(SimulatedTensor.of, SimulatedCuda)
    return SimulatedTensor.of
