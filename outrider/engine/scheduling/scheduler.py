"""Selection of the sequences of the next step, and preemption if the cache is full."""

import logging
from collections.abc import Iterable, Mapping, Sequence, Set

from outrider.decoding.draft import ROOT
from outrider.engine.blame import BlamedError, blame
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.forward.batch import Item
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import Task
from outrider.pace.settings import MAX_DEPTH

Selected = list[tuple[Task, Item]]

logger = logging.getLogger(__name__)

SPARE_SHARE = 0.1  # share of the cache that idle work leaves free


class Scheduler:
    """Scheduler that serves the oldest sequence first; the youngest sequence is preempted and computed again.

    All prompts together get ``prefill_chunk`` tokens of a step, so decoding waits for at most a chunk. A
    suffix that fits into one block does not count, since each round of a sequence begins with such a suffix.
    A prompt to be scored reuses no cached prefix, because cached tokens give no logits. Other sequences may
    reuse the blocks that it computes.

    Work that yields comes last. While other sequences are open, it gets a block of tokens per step. Its
    sequence is preempted first.
    """

    def __init__(self, settings: EngineSettings, cache: PagedCache) -> None:
        self._settings = settings
        self._cache = cache

    def select(self, tasks: Mapping[int, Task], sequences: Mapping[int, EngineSequence]) -> Selected:
        """Returns the next step's items, with reserved cache; empty only if there are no tasks.

        Args:
            tasks: tasks by number of their sequence.
            sequences: all open sequences by number, oldest first.

        Raises:
            BlamedError: a sequence cannot take part, in this step or ever.
        """
        selected = self._fill(tasks, sequences)
        while tasks and not selected:
            oldest = tasks[min(tasks)]
            if all(task.yields for task in tasks.values()):
                raise BlamedError(oldest.sequence) from CacheTooSmallError("other sequences hold the cache")
            # The cache is held by sequences without work, or by drafted tokens.
            holding = [sequence for sequence in sequences.values() if sequence.blocks]
            idle = [sequence for sequence in holding if sequence.number not in tasks]
            for sequence in idle[-1:] or holding:
                self._preempt(sequence, tasks)
            selected = self._fill(tasks, sequences)
            if not (holding or selected):
                reason = "it does not fit into the whole cache"
                raise BlamedError(oldest.sequence) from CacheTooSmallError(reason)
        return selected

    def select_idle(self, tasks: Mapping[int, Task]) -> Selected:
        """Returns the items of a step of idle work, which uses only free cache above SPARE_SHARE."""
        selected: Selected = []
        for task in tasks.values():
            if len(selected) == self._settings.max_sequences:
                break
            try:
                item = self._idle_item(task)
            except Exception as error:
                blame(task.sequence, error)
            if item is not None:
                selected.append((task, item))
        return selected

    def select_next(self, selected: Selected, tasks: Mapping[int, Task]) -> list[DecodeTask]:
        """Returns the tasks of the step after this step, before the tokens of this step are chosen.

        No task is returned if the next step depends on these tokens, if other work waits, or if a sequence
        would have to be preempted. Each task has cache for the token that it will feed.
        """
        following: list[DecodeTask] = []
        if len(selected) < len(tasks):
            return following
        for task, item in selected:
            if not (isinstance(task, DecodeTask) and task.is_foreseeable and item.num_logits):
                return []
            if task.ends_now:
                continue
            if not self._cache.reserve(task.sequence, len(task.sequence.tokens) + 1):
                return []
            following.append(task)
        return following

    def positions(self, selected: Selected, tasks: Mapping[int, Task]) -> Sequence[int]:
        """Returns how many positions the step may draft for each sequence, each after the previous position.

        An empty result stands for 1 each: no task wants more, other work waits, or a sequence feeds several
        nodes or more than a block of its prompt.
        """
        most, block_size = max([task.positions for task, _ in selected]), self._cache.block_size
        has_others = most > 1 and any(
            item.num_logits != 1 or item.num_committed > block_size for _, item in selected
        )
        if most == 1 or has_others or len(selected) < len(tasks):
            return ()
        return [self._positions_of(task, item) for task, item in selected]

    def _positions_of(self, task: Task, item: Item) -> int:
        """Returns how many positions a step may draft for a sequence; 1 if it feeds a tree or lacks cache."""
        count = task.positions if item.tree is None else 1
        length = item.sequence.written + len(item.tokens) + count - 1
        return count if count == 1 or self._cache.reserve(item.sequence, length) else 1

    def still_wanted(self, launched: Iterable[Task], tasks: Mapping[int, Task]) -> Selected:
        """Returns the items of a step that was launched before the tokens of the previous step were known.

        A task is left out if its sequence has ended, was closed, or has other work since.
        """
        wanted: Selected = []
        for task in launched:
            if tasks.get(task.sequence.number) is task:
                try:
                    item = self._item(task, budget=1)
                except Exception as error:
                    blame(task.sequence, error)
                assert item is not None
                wanted.append((task, item))
        return wanted

    def _idle_item(self, task: Task) -> Item | None:
        sequence, tree = task.sequence, task.tree()
        length = len(sequence.tokens) + len(tree)
        left = self._cache.pool.available - (self._cache.blocks_for(length) - len(sequence.blocks))
        if not task.nodes() or left < SPARE_SHARE * self._cache.pool.num_blocks:
            return None
        if not self._cache.reserve(sequence, length):
            return None
        nodes = list(tree.tokens[len(sequence.pending) :])
        return Item(sequence, nodes, 0, len(nodes), None if tree.is_chain else tree)

    def _fill(self, tasks: Mapping[int, Task], sequences: Mapping[int, EngineSequence]) -> Selected:
        selected: Selected = []
        budget = self._settings.prefill_chunk
        assert budget is not None  # resolved settings leave no value open
        rows = self._rows_for_scores(tasks)
        computed: dict[bytes, EngineSequence] = {}  # key: digest of a block that the sequence will fill
        yielding = {number for number, task in tasks.items() if task.yields}
        left = self._left_for_yielding(sequences, yielding) if yielding else 0
        for number in [*sorted(tasks.keys() - yielding), *sorted(yielding)]:
            task = tasks[number]
            if len(selected) == self._settings.max_sequences:
                break
            try:
                if self._waits_for_prefix(task, computed):
                    continue
                if task.sequence.matcher is not None:
                    task.constrain()
                share = min(budget, left) if task.yields else budget
                if not self._make_room(task, tasks, sequences, share):
                    break
                item = self._item(task, share) if task.chooses else self._rated_item(task, share, rows)
            except Exception as error:
                blame(task.sequence, error)
            if item is not None:
                selected.append((task, item))
                rows -= 0 if task.chooses else item.num_logits
                left -= item.num_committed if task.yields else 0
                budget -= item.num_committed if item.num_committed > self._cache.block_size else 0
        return selected

    def _waits_for_prefix(self, task: Task, computed: dict[bytes, EngineSequence]) -> bool:
        """Whether an older sequence computes blocks that this sequence will adopt.

        computed: older sequences by the digests that they will publish. Unless this sequence waits, its
        digests are added.
        """
        sequence = task.sequence
        if task.chooses:
            if len(sequence.tokens) - sequence.cached <= self._cache.block_size:
                return False
            self._cache.adopt_prefix(sequence)
        digests = self._cache.to_be_published(sequence)
        if task.chooses and self._cache.will_share(digests, computed):
            return True
        computed.update(dict.fromkeys(digests, sequence))
        return False

    def _make_room(
        self, task: Task, tasks: Mapping[int, Task], sequences: Mapping[int, EngineSequence], budget: int
    ) -> bool:
        """Reserves cache for the next step, preempting younger sequences; False: the sequence must wait.

        budget: prompt tokens that the step may feed.
        """
        sequence, cache, length = task.sequence, self._cache, len(task.sequence.tokens)
        if sequence.cached == length and ROOT in task.nodes():
            cache.roll_back(sequence, length - 1)  # its last token is fed again for its logits
        length += len(task.tree().tokens)
        if cache.reserve(sequence, length, budget):
            return True
        for other in sequences.values():
            if other.number not in tasks:
                cache.shrink(other)
        while not cache.reserve(sequence, length, budget):
            holding = (other for other in sequences.values() if other.blocks or other is sequence)
            youngest = max(holding, key=lambda other: (_yields(other, tasks), other.number))
            self._preempt(youngest, tasks)
            if youngest is sequence:
                return False
            if task.chooses:
                cache.adopt_prefix(sequence)  # a slot for recurrent states may be free now
        return True

    def _preempt(self, sequence: EngineSequence, tasks: Mapping[int, Task]) -> None:
        sequence.preemptions += bool(sequence.blocks)
        logger.debug("sequence %d gives up %d blocks", sequence.number, len(sequence.blocks))
        self._cache.release(sequence)
        if sequence.number in tasks:
            tasks[sequence.number].restart()

    def _rows_for_scores(self, tasks: Mapping[int, Task]) -> int:
        """Returns how many of the memory plan's rows of logits are left after all Drafts of a step."""
        most = self._settings.max_sequences
        others = sum([task.chooses for task in tasks.values()])
        return (most - min(others, most - 1)) * (1 + MAX_DEPTH)

    def _left_for_yielding(self, sequences: Mapping[int, EngineSequence], yielding: Set[int]) -> int:
        """Returns the number of tokens per step for all work that yields together."""
        if sequences.keys() > yielding:
            return self._cache.block_size
        assert self._settings.prefill_chunk is not None  # resolved settings leave no value open
        return self._settings.prefill_chunk

    def _rated_item(self, task: Task, budget: int, rows: int) -> Item | None:
        """Returns the next part of committed tokens to rate; rows of logits may be wanted for all."""
        sequence = task.sequence
        count = min(task.num_tokens, budget, rows)
        tokens = sequence.tokens[sequence.cached : sequence.cached + count]
        return Item(sequence, tokens, count, task.rows_of_part(count), None) if count else None

    def _item(self, task: Task, budget: int) -> Item | None:
        """Returns the sequence's next item; None: the step's budget of prompt tokens is used up."""
        sequence, tree = task.sequence, task.tree()
        tokens = sequence.tokens[sequence.cached :]
        count = len(tokens)
        if count > self._cache.block_size and count > budget:
            return Item(sequence, tokens[:budget], budget, 0, None) if budget else None
        tokens += tree.tokens[len(sequence.pending.tokens) :]
        return Item(sequence, tokens, count, len(task.nodes()), None if tree.is_chain else tree)


def _yields(sequence: EngineSequence, tasks: Mapping[int, Task]) -> bool:
    """Whether the sequence has work that yields to all other work."""
    return sequence.number in tasks and tasks[sequence.number].yields
