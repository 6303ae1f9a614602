"""A head without weights, beside a target without a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.simulated_runner import RIGHT, SETTINGS, WRONG, Cost, RankOf, StepClock
from outrider.decoding.draft import Draft
from outrider.engine.choosing.asked import Asked
from outrider.engine.drafters.beside_target import BesideTarget, Target
from outrider.pace.step import StepSize


@dataclass(frozen=True)
class SimulatedHead:
    """One that stands beside the target and drafts chains."""

    cost: Cost  # of one of its passes
    rank_of: RankOf


class BesideSimulated(BesideTarget):
    """By the registry's law for EAGLE-3 a Draft takes a pass for each token.

    The first of them takes in what the target has fed, as it does after every step, a plain one too.
    """

    def __init__(self, head: SimulatedHead, clock: StepClock) -> None:
        super().__init__(SETTINGS.model_copy(update={"drafter": "eagle3"}))
        self._head, self._clock = head, clock

    def load(self, target: Target) -> None:
        """There is nothing to be loaded."""

    def watch(self, texts: Sequence[Any]) -> None:
        self._pass(len(texts))

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        drafts = [self._draft(one) for one in asked]
        for position in range(1, max(map(len, drafts))):
            self._pass(sum(len(draft) > position for draft in drafts))
        return drafts

    def _draft(self, asked: Asked) -> Draft:
        text, length = asked.text, len(asked.text.tokens)
        left = text.prompt_length + text.sampling.max_tokens - length - 1
        ranks = (
            self._head.rank_of(text.noise_key, length + offset) for offset in range(min(asked.depth, left))
        )
        return Draft.chain([RIGHT if rank == 0 else WRONG[0] for rank in ranks])

    def _pass(self, sequences: int) -> None:
        self._clock.advance(self._head.cost(StepSize(sequences, sequences)))
