"""Which sequences take part in the next step, and who gives up cache when it runs short."""

from collections.abc import Mapping

from decoding.draft import ROOT
from engine.batch import Item
from engine.cache import PagedCache
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.tasks import Task

Selected = list[tuple[Task, Item]]

SPARE_SHARE = 0.1  # of the cache, that idle work leaves free


class Scheduler:
    """The oldest sequence comes first, in steps and in cache; the youngest is preempted and computed again.

    All prompts together get ``prefill_chunk`` tokens of a step, so nobody waits for more than a chunk. A
    suffix that fits into one block does not count: that is how a sequence goes on after a round.
    """

    def __init__(self, settings: EngineSettings, cache: PagedCache) -> None:
        self._settings = settings
        self._cache = cache

    def select(self, tasks: Mapping[int, Task], sequences: Mapping[int, Sequence]) -> Selected:
        """The next step's items, each with cache to write to. Empty only when there are no tasks.

        Args:
            tasks: by the number of their sequence.
            sequences: every open one by its number, oldest first.
        """
        selected = self._fill(tasks, sequences)
        while tasks and not selected:
            # Nobody can start, because sequences between two pieces of work hold the cache.
            idle = [
                sequence for number, sequence in sequences.items() if sequence.blocks and number not in tasks
            ]
            self._preempt(idle[-1], tasks)
            selected = self._fill(tasks, sequences)
        return selected

    def select_idle(self, tasks: Mapping[int, Task]) -> Selected:
        """The next step of work for which nobody waits: only with cache that is left over."""
        selected: Selected = []
        for task in tasks.values():
            sequence, tree = task.sequence, task.tree()
            missing = self._cache.blocks_for(len(sequence.tokens) + len(tree)) - len(sequence.blocks)
            left = self._cache.pool.available - missing
            if len(selected) == self._settings.max_running:
                break
            if task.nodes() and left >= SPARE_SHARE * self._cache.pool.num_blocks:
                self._cache.reserve(sequence, len(sequence.tokens) + len(tree))
                nodes = list(tree.tokens[len(sequence.pending) :])
                selected.append((task, Item(sequence, nodes, 0, len(nodes), None if tree.is_chain else tree)))
        return selected

    def _fill(self, tasks: Mapping[int, Task], sequences: Mapping[int, Sequence]) -> Selected:
        selected: Selected = []
        budget = self._settings.prefill_chunk
        for number in sorted(tasks):
            task = tasks[number]
            if len(selected) == self._settings.max_running or not self._make_room(task, tasks, sequences):
                break
            item = self._item(task, budget)
            if item is not None:
                selected.append((task, item))
                budget -= item.num_committed if item.num_committed > self._cache.block_size else 0
        return selected

    def _make_room(self, task: Task, tasks: Mapping[int, Task], sequences: Mapping[int, Sequence]) -> bool:
        """Gets the sequence cache for its next step, at the cost of younger ones; False: it has to wait."""
        sequence, cache = task.sequence, self._cache
        if not sequence.blocks:
            cache.adopt_prefix(sequence)
        if ROOT in task.nodes() and sequence.cached == len(sequence.tokens):
            cache.roll_back(sequence, sequence.cached - 1)  # logits come only from a token that is fed
        length = len(sequence.tokens) + len(task.tree())
        if not cache.reserve(sequence, length):
            for other in sequences.values():
                if other.number not in tasks:
                    cache.shrink(other)
        while not cache.reserve(sequence, length):
            youngest = next(
                other for other in reversed(list(sequences.values())) if other.blocks or other is sequence
            )
            self._preempt(youngest, tasks)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, tasks: Mapping[int, Task]) -> None:
        sequence.preemptions += bool(sequence.blocks)
        self._cache.release(sequence)
        if sequence.number in tasks:
            tasks[sequence.number].restart()

    def _item(self, task: Task, budget: int) -> Item | None:
        """What the sequence feeds next; None when the step's share for prompts is used up."""
        sequence, tree = task.sequence, task.tree()
        suffix = sequence.tokens[sequence.cached :]
        if len(suffix) > max(budget, self._cache.block_size):
            return Item(sequence, suffix[:budget], budget, 0, None) if budget else None
        nodes = tree.tokens[len(sequence.pending) :]
        return Item(
            sequence, [*suffix, *nodes], len(suffix), len(task.nodes()), None if tree.is_chain else tree
        )
