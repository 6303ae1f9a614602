"""Change of the adapters of a target, which rank 0 sends to the other ranks between two steps."""

from dataclasses import dataclass

import msgspec
import numpy as np

from outrider.engine.inputs.step_input import Numbers
from outrider.engine.work import AskedAdapter


@dataclass(frozen=True)
class AdapterChange:
    """Load or removal of an adapter."""

    number: int  # number of the adapter at all ranks
    asked: AskedAdapter | None = None  # adapter to be loaded; None: the adapter of that number is dropped

    def to_numbers(self) -> Numbers:
        return np.frombuffer(msgspec.msgpack.encode(self), np.uint8).astype(np.int64)

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "AdapterChange":
        """Returns the change that ``to_numbers`` serialized."""
        return msgspec.msgpack.decode(numbers.astype(np.uint8).tobytes(), type=cls)
