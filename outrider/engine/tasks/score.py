"""Scores of given tokens: log-probabilities with which the model would have chosen them."""

import math
from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.decoding.sampling import scores
from outrider.engine.blame import NotFiniteError
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import Result, Scored


class ScoreTask(Task):
    """Reports log-probabilities of the committed tokens from a position on, in parts as they are fed.

    The last token is not fed: its successor is not needed.
    """

    chooses = False

    def __init__(self, sequence: EngineSequence, start: int, arrived: float) -> None:
        """start: position of the first token whose log-probability is wanted, at least 1."""
        super().__init__(sequence, arrived)
        self._next = start

    def tree(self) -> Draft:
        return NO_DRAFT

    def nodes(self) -> Sequence[int]:
        return []

    @property
    def num_tokens(self) -> int:
        return max(len(self.sequence.tokens) - 1 - self.sequence.cached, 0)

    def rows_of_part(self, count: int) -> int:
        """Returns the number of wanted rows; each row scores the token after its fed token."""
        return max(0, min(count, self.sequence.cached + count + 1 - self._next))

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        """Scores the tokens after the fed tokens. Raises NotFiniteError."""
        sequence, start = self.sequence, self._next
        self._next += len(choices.logits)
        tokens = sequence.tokens[start : self._next]
        told = scores(choices.logits, tokens, sequence.sampling.logprobs or 0)
        if any(math.isnan(position.chosen) for position in told):
            raise NotFiniteError
        self.done = self._next == len(sequence.tokens)
        return [Scored(sequence.number, start, told, self.timings())]
