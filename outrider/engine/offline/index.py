"""Drafting from an index over each sequence (outrider/drafters/index.py), in the target's process."""

from collections.abc import Callable, Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.index import Index, as_drawn
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.drafters.drafter import Drafter


class IndexDrafter(Drafter):
    """Drafter of chains; it ignores the requested number of alternatives."""

    def __init__(self, index: Callable[[], Index]) -> None:
        """index: makes the index of a sequence."""
        self._index = index
        self._indices: dict[DraftedSequence, Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts from the tokens of each sequence."""
        return [self._look_up(request) for request in requests]

    def _look_up(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        index = self._indices.setdefault(sequence, self._index())
        index.append(sequence.tokens[len(index) :])
        return as_drawn(index.propose(request.depth), sequence.sampling.verification)

    def forget(self, sequence: DraftedSequence) -> None:
        """Drops the sequence's index."""
        self._indices.pop(sequence, None)
