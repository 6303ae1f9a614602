"""What every drafter of the engine is: one method, for the whole batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.engine.choosing.asked import Asked, Text


class Drafter(ABC):
    """Guesses what the target will say next. A wrong guess costs time, never correctness."""

    @abstractmethod
    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """A Draft for each; with the distributions it was drawn from unless verification is coupled."""

    def forget(self, text: Text) -> None:
        """The generation has ended: whatever is kept for it may go."""
        return
