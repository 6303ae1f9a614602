"""Drafting without a model: what followed the same tokens earlier in prompt or output."""

from collections.abc import Sequence

from outrider.decoding.draft import Draft, SparseProbs
from outrider.drafters.ngram import NgramIndex
from outrider.engine.drafters.drafter import Drafter, Generation


class LookupDrafter(Drafter):
    """Chains only, whatever ``leaves`` says."""

    def __init__(self) -> None:
        self._indices: dict[Generation, NgramIndex] = {}

    def propose(self, generations: Sequence[Generation], depth: int, leaves: int) -> list[Draft]:
        """Drafts from what each generation holds by itself."""
        return [self._look_up(generation, depth) for generation in generations]

    def _look_up(self, generation: Generation, depth: int) -> Draft:
        index = self._indices.setdefault(generation, NgramIndex())
        index.append(generation.tokens[len(index) :])
        draft = index.propose(depth)
        if generation.sampling.verification == "coupled":
            return draft
        return Draft.chain(draft.tokens, [SparseProbs((token,), (1.0,)) for token in draft.tokens])

    def forget(self, generation: Generation) -> None:
        """Drops the generation's index."""
        self._indices.pop(generation, None)
