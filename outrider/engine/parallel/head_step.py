"""A step of the head beside the target: what rank 0 tells the ranks that hold a share of it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from outrider.engine.step_input import Feed, Numbers, StepInput


@dataclass(frozen=True)
class HeadStep:
    """The states that it begins with follow by themselves, from device to device."""

    num_states: int  # rows
    feeds: Items[Feed] = ()  # a token after each state, for a head with a cache; none: it feeds nothing
    head: int = 0  # of several, which one
    wants_logits: bool = True

    def to_numbers(self) -> Numbers:
        fed = StepInput([], np.zeros(0, np.int64), [*self.feeds])
        numbers = np.array([self.num_states, self.head, self.wants_logits], np.int64)
        return np.concatenate([numbers, fed.to_numbers()])

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> "HeadStep":
        """What ``to_numbers`` was called on."""
        num_states, head, wants_logits = numbers[:3].tolist()
        return cls(num_states, StepInput.from_numbers(numbers[3:]).feeds, head, bool(wants_logits))
