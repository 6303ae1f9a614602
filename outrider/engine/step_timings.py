"""Times of an engine's step. Torch-free."""

from dataclasses import dataclass
from typing import Literal

# gathered: attention copies the blocks of the cache together. kernels: attention reads them in place.
# graph: a CUDA graph replays the whole pass with these kernels.
Path = Literal["gathered", "kernels", "graph"]


@dataclass(frozen=True)
class StepTimings:
    """Seconds of the parts of a step, and its size."""

    build: float  # packing of the items
    forward: float  # forward pass; on a GPU by CUDA events
    sample: float  # choice of tokens, until they are known on the host
    total: float
    sequences: int
    tokens: int
    path: Path
