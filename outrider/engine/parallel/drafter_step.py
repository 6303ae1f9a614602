"""Step of a target drafter, which rank 0 sends to the ranks that hold a share of it."""

from dataclasses import dataclass

import numpy as np

from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import NOTHING_FED, Numbers, StepInput


@dataclass(frozen=True)
class DrafterStep:
    """Step of a drafter, without the hidden states of a head, which are sent from device to device."""

    fed: StepInput = NOTHING_FED  # input; a head is fed a token after each of its states
    num_states: int = 0  # rows of states
    part: int = 0  # index among several heads, or among several parts of the target
    wants_logits: bool = True
    drafter: int = 0  # index of the drafter among the target's drafters
    positions: tuple[int, ...] = ()  # positions of each sequence's chain; empty: rank 0 sends each position
    reads_verdicts: bool = False  # whether rank 0's device provides the tokens of the newest Verdicts

    def to_numbers(self) -> Numbers:
        flags = self.wants_logits, self.reads_verdicts
        given = self.num_states, self.part, *flags, self.drafter, len(self.positions), *self.positions
        return np.concatenate([np.array(given, np.int64), self.fed.to_numbers()])

    @classmethod
    def from_numbers(cls, numbers: Numbers, tables: BlockTables) -> "DrafterStep":
        """Returns the step that ``to_numbers`` serialized."""
        num_states, part, wants_logits, reads_verdicts, drafter, count = numbers[:6].tolist()
        return cls(
            StepInput.from_numbers(numbers[6 + count :], tables),
            num_states,
            part,
            bool(wants_logits),
            drafter,
            tuple(numbers[6 : 6 + count].tolist()),
            bool(reads_verdicts),
        )
