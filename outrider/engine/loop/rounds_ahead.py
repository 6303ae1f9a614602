"""Rounds that a device starts before the host knows the Verdicts and Drafts that precede them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.drafters.registry import split_name
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.asked_logprobs import comes_along
from outrider.engine.device_time import Mark
from outrider.engine.drafters.drafts_under_way import DraftsUnderWay
from outrider.engine.drafters.target_drafter import feed_of
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.step_input import Feed, ForeseenRounds
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.decode import DecodeTask


@dataclass(frozen=True)
class RoundsAhead:
    """Next round of each sequence of a step. Only the device knows its Draft and its first position."""

    tasks: Sequence[DecodeTask]  # tasks of these rounds, whose Drafts have unknown tokens
    feeds: Sequence[Feed]  # feeds as if nothing was accepted; their tokens are indices into ``chosen``
    chosen: Tensor  # DraftsUnderWay.numbers
    foreseen: ForeseenRounds
    drafted: Mark  # mark at the end of drafting


class RoundsAheadPlanner:
    """Decides whether a target's next step can start without the host, and reserves its cache."""

    def __init__(
        self,
        cache: PagedCache,
        settings: EngineSettings,
        max_length: int,
        next_round: Callable[[DecodeTask, Draft], DecodeTask],
    ) -> None:
        """
        Args:
            max_length: tokens of the longest sequence.
            next_round: returns the task of a task's next round, with a Draft.
        """
        self._cache, self._settings, self._max_length = cache, settings, max_length
        self._next_round = next_round

    def after(self, selected: Selected, under_way: DraftsUnderWay) -> RoundsAhead | None:
        """Returns the rounds after the current step; None: a sequence needs the host first.

        under_way: Drafts after this step's Verdicts.
        """
        # Not tested with recurrent states or with batch-invariant numerics.
        if self._cache.states is not None or self._settings.batch_invariant:
            return None
        if len(under_way.requests) < len(selected):
            return None
        of_sequences = {task.sequence: task for task, _ in selected}
        tasks, feeds, may_branch = list[DecodeTask](), list[Feed](), False
        for row, request in enumerate(under_way.requests):
            task = of_sequences[request.engine_sequence]
            tree, tokens = under_way.tree_of(row)
            if not isinstance(task, DecodeTask) or not self._may_follow(task, tree):
                return None
            start = len(task.sequence.tokens)
            feed = feed_of(task.sequence, tokens, start, num_logits=len(tokens))
            feeds.append(feed if tree.is_chain else structs.replace(feed, tree=tree))
            tasks.append(self._next_round(task, tree))
            may_branch |= not task.tree().is_chain
        foreseen = ForeseenRounds(len(tasks), may_branch)
        return RoundsAhead(tasks, feeds, under_way.numbers, foreseen, under_way.arrival)

    def _may_follow(self, task: DecodeTask, tree: Draft) -> bool:
        """Whether a task's next round, with this tree, can start on the device after any Verdict."""
        sequence, lease = task.sequence, task.lease
        length = len(sequence.tokens)
        end = length + task.tree().depth + 1 + len(tree)
        _, index = split_name(lease.drafter)
        is_on_device = not index and sequence.target.ahead is None and comes_along(sequence.sampling)
        is_leased = length + 1 < lease.until and len(tree) < FEW_QUERIES
        has_room = end <= self._max_length and self._cache.reserve(sequence, end)
        return bool(tree) and is_on_device and is_leased and has_room
