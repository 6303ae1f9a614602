"""Step of the target drafter, which rank 0 sends to the ranks that hold a share of it."""

from dataclasses import dataclass

import numpy as np

from outrider.engine.inputs.step_input import NOTHING_FED, Numbers, StepInput


@dataclass(frozen=True)
class DrafterStep:
    """Step of a drafter, without the states of a head, which travel from device to device."""

    fed: StepInput = NOTHING_FED  # for a head a token after each of its states
    num_states: int = 0  # rows
    part: int = 0  # which of several heads, or of several parts of the target
    wants_logits: bool = True

    def to_numbers(self) -> Numbers:
        numbers = np.array([self.num_states, self.part, self.wants_logits], np.int64)
        return np.concatenate([numbers, self.fed.to_numbers()])

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "DrafterStep":
        """Returns the step that ``to_numbers`` was called on."""
        num_states, part, wants_logits = numbers[:3].tolist()
        return cls(StepInput.from_numbers(numbers[3:]), num_states, part, bool(wants_logits))
