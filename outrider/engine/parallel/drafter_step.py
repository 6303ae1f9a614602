"""Step of a target drafter, which rank 0 sends to the ranks that hold a share of it."""

from dataclasses import dataclass

import numpy as np

from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import NOTHING_FED, Numbers, StepInput


@dataclass(frozen=True)
class DrafterStep:
    """Step of a drafter, without the states of a head, which travel from device to device."""

    fed: StepInput = NOTHING_FED  # for a head a token after each of its states
    num_states: int = 0  # rows
    part: int = 0  # which of several heads, or of several parts of the target
    wants_logits: bool = True
    drafter: int = 0  # number of the drafter among those of the target
    positions: tuple[int, ...] = ()  # positions of each sequence's chain; none: rank 0 sends each position

    def to_numbers(self) -> Numbers:
        sizes = self.num_states, self.part, self.wants_logits, self.drafter, len(self.positions)
        return np.concatenate([np.array([*sizes, *self.positions], np.int64), self.fed.to_numbers()])

    @classmethod
    def from_numbers(cls, numbers: Numbers, tables: BlockTables) -> "DrafterStep":
        """Returns the step that ``to_numbers`` was called on."""
        num_states, part, wants_logits, drafter, count = numbers[:5].tolist()
        positions, rest = numbers[5 : 5 + count], numbers[5 + count :]
        fed = StepInput.from_numbers(rest, tables)
        return cls(fed, num_states, part, bool(wants_logits), drafter, tuple(positions.tolist()))
