"""Drafting from an index over each text, in the target's process: see outrider/drafters/index.py."""

from collections.abc import Callable, Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.index import Index, as_drawn
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.drafters.drafter import Drafter


class IndexDrafter(Drafter):
    """Chains only, whatever is said of leaves."""

    def __init__(self, index: Callable[[], Index]) -> None:
        """index: makes one for a text."""
        self._index = index
        self._indices: dict[DraftedSequence, Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts from what each text holds by itself."""
        return [self._look_up(request) for request in requests]

    def _look_up(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        index = self._indices.setdefault(sequence, self._index())
        index.append(sequence.tokens[len(index) :])
        return as_drawn(index.propose(request.depth), sequence.sampling.verification)

    def forget(self, sequence: DraftedSequence) -> None:
        """Drops the text's index."""
        self._indices.pop(sequence, None)
