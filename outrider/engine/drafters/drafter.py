"""Interface of the engine's drafters, which draft for a whole batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest


class Drafter(ABC):
    """Guesses what the target will say next. A wrong guess costs time, never correctness."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a Draft for each request, with its distributions unless verification is coupled."""

    def forget(self, sequence: DraftedSequence) -> None:
        """Frees all state of a sequence that has ended."""
        return
