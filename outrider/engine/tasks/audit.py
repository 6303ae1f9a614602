"""Audit of an answer: how far each of its tokens is from the choice under keyed noise."""

import math
from dataclasses import replace

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.grammar import Mask
from outrider.decoding.margins import margins
from outrider.engine.blame import NotFiniteError
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.rating import RatingTask
from outrider.engine.work import Audited


class AuditTask(RatingTask):
    """Reports the margin of each token of the answer, even after a wrong token.

    The prompt is computed again, because cached keys and values could hide a fault of this worker.
    """

    yields = True

    def __init__(self, sequence: EngineSequence, arrived: float) -> None:
        super().__init__(sequence, sequence.prompt_length, arrived)

    def rated(self, start: int, end: int, choices: Choices) -> Audited:
        if not choices.logits.amax(dim=1).isfinite().all():
            raise NotFiniteError
        sequence = self.sequence
        contexts, may_come = self._contexts(start, end)
        found = margins(choices.logits, contexts, sequence.tokens[start:end])
        told = (margin if may else math.inf for margin, may in zip(found, may_come, strict=True))
        return Audited(sequence.number, start, tuple(told), self.timings())

    def _contexts(self, start: int, end: int) -> tuple[list[ChoiceContext], list[bool]]:
        """Returns the contexts of positions, and whether any token may come at each position.

        No token may come after a token that ends the generation, or after a token that the grammar refuses.
        """
        sequence, first = self.sequence, self.sequence.prompt_length
        answer = sequence.tokens[first:end]
        may_come = [sequence.end_token_ids.isdisjoint(answer[: at - first]) for at in range(start, end)]
        masks: list[Mask | None] = [None] * (end - start)
        if sequence.matcher is not None:
            nodes = range(start - first - 1, end - first - 1)
            masks = sequence.matcher.masks([], Draft.chain(answer[:-1]), nodes)
            may_come = [mask is not None for mask in masks]
        contexts = [
            replace(
                sequence.row(() if sequence.needs_no_text else answer[: at - first], (), mask),
                position=at - sequence.noise_origin,
            )
            for at, mask in zip(range(start, end), masks, strict=True)
        ]
        return contexts, may_come
