"""Drafting from an index over each text, in the target's process: see outrider/drafters/index.py."""

from collections.abc import Callable, Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.index import Index, as_drawn
from outrider.engine.choosing.asked import Asked, Text
from outrider.engine.drafters.drafter import Drafter


class IndexDrafter(Drafter):
    """Chains only, whatever is said of leaves."""

    def __init__(self, index: Callable[[], Index]) -> None:
        """index: makes one for a text."""
        self._index = index
        self._indices: dict[Text, Index] = {}

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """Drafts from what each text holds by itself."""
        return [self._look_up(one) for one in asked]

    def _look_up(self, asked: Asked) -> Draft:
        text = asked.text
        index = self._indices.setdefault(text, self._index())
        index.append(text.tokens[len(index) :])
        return as_drawn(index.propose(asked.depth), text.sampling.verification)

    def forget(self, text: Text) -> None:
        """Drops the text's index."""
        self._indices.pop(text, None)
