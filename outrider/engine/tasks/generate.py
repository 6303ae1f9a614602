"""Decoding freely, a token a step."""

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, Sequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import Generated, Result


class GenerateTask(Task):
    """Grows the sequence until it has ``length`` tokens or ends."""

    def __init__(self, sequence: Sequence, length: int, arrived: float) -> None:
        super().__init__(sequence, arrived)
        self.length = length

    def tree(self) -> Draft:
        return NO_DRAFT

    def nodes(self) -> list[int]:
        return [ROOT]

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        sequence = self.sequence
        token = choices.chosen[0]
        position = len(sequence.tokens)
        sequence.tokens.append(token)
        finish = sequence.finish_of(token, position + 1)
        self.done = finish is not None or len(sequence.tokens) >= self.length
        logprobs = choices.logprobs([0], [token])
        return [Generated(sequence.number, position, token, logprobs, finish, self.timings())]
