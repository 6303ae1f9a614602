"""What every drafter is: one method. Adding one is one file here and one line in DRAFTERS."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling


@dataclass(eq=False)
class Generation:
    """One request under way in this process. ``tokens``, the committed ones, only ever grow."""

    prompt_length: int
    noise_key: int
    sampling: Sampling
    tokens: list[int]
    round: int = 0


class Drafter(ABC):
    """Guesses what the target will say next. A wrong guess costs time, never correctness."""

    @abstractmethod
    def propose(self, generations: Sequence[Generation], depth: int, leaves: int) -> list[Draft]:
        """A Draft for each generation, a chain of at most ``depth`` tokens and ``leaves`` runners-up.

        Under the ratio rules a Draft carries the distributions that its tokens were really drawn from.
        """

    def forget(self, generation: Generation) -> None:
        """The generation has ended: whatever is kept for it may go."""
        return
