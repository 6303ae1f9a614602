"""Rating of committed tokens by their logits, part by part as they are fed; no token is chosen."""

from abc import abstractmethod
from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import Result


class RatingTask(Task):
    """Rates each committed token from a position on, by the logits before it.

    The last token is not fed: its successor is not needed.
    """

    chooses = False

    def __init__(self, sequence: EngineSequence, start: int, arrived: float) -> None:
        """start: position of the first token to be rated, at least 1."""
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
        """Returns the number of wanted rows; each row rates the token after its fed token."""
        return max(0, min(count, self.sequence.cached + count + 1 - self._next))

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        """Rates the tokens after the fed tokens. Raises as ``rated``."""
        start = self._next
        self._next += len(choices.logits)
        self.done = self._next == len(self.sequence.tokens)
        return [self.rated(start, self._next, choices)]

    @abstractmethod
    def rated(self, start: int, end: int, choices: Choices) -> Result:
        """Returns the result for the tokens from ``start`` up to ``end``, rated by the logits of ``choices``.

        Raises:
            NotFiniteError: the logits of a position are not finite.
        """
