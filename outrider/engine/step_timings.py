"""Where the time of an engine's step went. Torch-free."""

from dataclasses import dataclass
from typing import Literal

# Attention gathers its blocks; it reads them where they lie; the whole pass is replayed besides.
Path = Literal["gathered", "kernels", "graph"]


@dataclass(frozen=True)
class StepTimings:
    """Where a step's time went, in seconds, and how much it did."""

    build: float  # packing the items
    forward: float  # the model: on a GPU by the device's own time
    sample: float  # choosing tokens, until the host knows them
    total: float
    sequences: int
    tokens: int
    path: Path
