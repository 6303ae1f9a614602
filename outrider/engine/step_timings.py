"""Times of an engine's step. Torch-free."""

from dataclasses import dataclass
from typing import Literal

# Attention gathers its blocks; it reads them where they lie; the whole pass is replayed besides.
Path = Literal["gathered", "kernels", "graph"]


@dataclass(frozen=True)
class StepTimings:
    """Seconds of the parts of a step, and its size."""

    build: float  # packing the items
    forward: float  # the model: on a GPU by the device's own time
    sample: float  # choosing tokens, until the host knows them
    total: float
    sequences: int
    tokens: int
    path: Path
