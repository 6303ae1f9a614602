"""Drafting with a smaller model that shares the target's vocabulary, in the target's process."""

from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.engine.choosing.asked import Asked, Text
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Propose, Proposed


class DraftModel(Drafter):
    """An engine of its own, whose cache follows each text."""

    def __init__(self, draft: Engine) -> None:
        self._draft = draft
        self._sequences: dict[Text, EngineSequence] = {}

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """One step per position, for all at once."""
        for one in asked:
            held = self._held(one.text)
            base = len(held.tokens)
            tokens = tuple(one.text.tokens[base:])
            self._draft.submit(Propose(held.number, base, tokens, one.depth, one.round, one.alternatives))
        drafts: dict[int, Draft] = {}
        while self._draft.has_work:
            results = self._draft.step()
            drafts |= {result.sequence: result.draft for result in results if isinstance(result, Proposed)}
        return [drafts[self._held(one.text).number] for one in asked]

    def _held(self, text: Text) -> EngineSequence:
        if text not in self._sequences:
            opened = self._draft.open(text.prompt_length, text.noise_key, text.sampling)
            self._sequences[text] = opened
        return self._sequences[text]

    def forget(self, text: Text) -> None:
        """Frees the text's cache."""
        if text in self._sequences:
            self._draft.close(self._sequences.pop(text))
