"""Drafting with a model: a chain token by token, or a tree level by level."""

from decoding.draft import ROOT, Draft
from engine.cache import PagedCache
from engine.choices import Choices
from engine.sequence import NO_DRAFT
from engine.tasks import Task
from engine.work import Propose, Proposed, Result


class ProposeTask(Task):
    """``depth`` steps, each adding a level of the tree. The last level is not fed: nobody asks what follows.

    A level of a tree holds ``width`` nodes: of every frontier node's ``width`` best tokens under the keyed
    noise those are kept that needed the fewest second choices on their path, earlier nodes first. An end of
    sequence is not drafted beyond. Under the ratio rules the Draft is a chain of ``depth`` tokens, sampled
    with noise of its own.
    """

    def __init__(self, work: Propose, room: int, arrived: float) -> None:
        """room: tokens that the sequence may still grow by."""
        super().__init__(work.sequence, arrived)
        self._round = work.round
        self._depth = min(work.depth, room - 1)  # the target adds one token of its own
        self._is_coupled = work.sequence.sampling.verification == "coupled"
        self._width = work.width if self._is_coupled else 1
        self.restart()

    def restart(self) -> None:
        super().restart()
        self._tree = NO_DRAFT
        self._frontier = [ROOT]
        self._second_choices = {ROOT: 0}
        self._level = 0

    @property
    def is_empty(self) -> bool:
        """True when nothing may be drafted."""
        return self._depth <= 0

    def tree(self) -> Draft:
        return self._tree

    def nodes(self) -> list[int]:
        return [] if self.is_empty else self._frontier

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        if not self.is_empty:
            self._grow(choices)
        self.done = self._level >= self._depth or not self._frontier
        return [self.result()] if self.done else []

    def result(self) -> Proposed:
        """The tree as it stands."""
        return Proposed(self.sequence, self._round, self._tree, self.timings())

    def _grow(self, choices: Choices) -> None:
        self._level += 1
        if not self._is_coupled:
            token, probs = choices.sample_draft_token(self._round)
            self._tree = Draft.chain((*self._tree.tokens, token), (*self._tree.draft_probs, probs))
            self._frontier = [len(self._tree) - 1]
            return
        candidates = [
            (self._second_choices[node] + rank, node, token)
            for node, best in zip(self._frontier, choices.best(self._width), strict=True)
            for rank, token in enumerate(best)
        ]
        candidates.sort(key=lambda candidate: candidate[0])
        self._frontier = []
        for second_choices, node, token in candidates[: self._width]:
            added = len(self._tree)
            self._tree = Draft((*self._tree.tokens, token), (*self._tree.parents, node))
            self._second_choices[added] = second_choices
            if token not in self.sequence.end_token_ids:
                self._frontier.append(added)
