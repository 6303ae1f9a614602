"""Drafting with a small model that shares the target's vocabulary."""

from collections.abc import Sequence

import outrider.engine.sequence
from outrider.decoding.draft import Draft
from outrider.engine.drafters.drafter import Drafter, Generation
from outrider.engine.engine import Engine
from outrider.engine.work import Propose, Proposed


class SmallModelDrafter(Drafter):
    """An engine of its own, whose cache follows each generation."""

    def __init__(self, draft: Engine) -> None:
        self._draft = draft
        self._sequences: dict[Generation, outrider.engine.sequence.Sequence] = {}

    def propose(self, generations: Sequence[Generation], depth: int, leaves: int) -> list[Draft]:
        """Drafts for all generations at once, one step per depth."""
        for generation in generations:
            held = self._sequences.get(generation)
            if held is None:
                held = self._draft.open(generation.prompt_length, generation.noise_key, generation.sampling)
                self._sequences[generation] = held
            base = len(held.tokens)
            self._draft.submit(
                Propose(held, base, tuple(generation.tokens[base:]), depth, generation.round, leaves)
            )
        drafts: dict[outrider.engine.sequence.Sequence, Draft] = {}
        while self._draft.has_work:
            results = self._draft.step()
            drafts |= {result.sequence: result.draft for result in results if isinstance(result, Proposed)}
        return [drafts[self._sequences[generation]] for generation in generations]

    def forget(self, generation: Generation) -> None:
        """Frees the generation's cache."""
        if generation in self._sequences:
            self._draft.close(self._sequences.pop(generation))
