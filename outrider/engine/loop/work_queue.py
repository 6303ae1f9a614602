"""The work under way: what is submitted becomes a task of its sequence, or a result at once."""

from collections.abc import Callable

import numpy as np

from outrider.decoding.draft import Draft, agreed
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.draft_ahead import DraftAhead
from outrider.engine.scheduling.batch_delay import BatchDelay
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.generate import GenerateTask
from outrider.engine.tasks.propose import ProposeTask
from outrider.engine.tasks.score import ScoreTask
from outrider.engine.tasks.task import Task
from outrider.engine.tasks.verify import NOTHING_FOLLOWS, Following, VerifyTask
from outrider.engine.work import Extend, Generate, Propose, Result, Score, TopUp, Verify, Work


class WorkQueue:
    """One task per sequence at most. A new piece of work voids the old, unless it only says how to go on."""

    def __init__(
        self,
        cache: PagedCache,
        draft_ahead: DraftAhead,
        batch_delay: BatchDelay,
        vocab_size: int,
        max_length: int,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            max_length: tokens of the longest sequence.
            clock: in seconds; a piece of work that nobody asked for arrives when it begins.
        """
        self.tasks: dict[int, Task] = {}  # by number of their sequence
        self.ready: list[Result] = []  # known without a step
        self._cache = cache
        self._draft_ahead = draft_ahead
        self._batch_delay = batch_delay
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._clock = clock

    def submit(self, sequence: EngineSequence, work: Work, arrived: float) -> None:
        """Takes on work that was checked; it arrived at that time."""
        if isinstance(work, TopUp):
            self._top_up(sequence, work)
        elif isinstance(work, Extend):
            self._extend(sequence, work)
        else:
            self._batch_delay.returned(sequence, arrived)
            ahead = self._draft_ahead.observe(sequence, work) if isinstance(work, Propose) else None
            self.void(sequence)
            unseen = self._unseen(sequence, work) if isinstance(work, Verify) else []
            if not unseen:
                self._commit(sequence, work.base, work.tokens)
            match work:
                case Verify() if unseen and sequence.has_ended:
                    pass  # its sender will see that
                case Verify():
                    draft = work.draft.after(unseen)
                    following = Following(work.next_depth, work.next_leaves, work.until)
                    self._verify(sequence, draft, work.round, arrived, following)
                case Generate():
                    length = len(sequence.tokens) + work.count
                    self.tasks[sequence.number] = GenerateTask(sequence, length, arrived)
                case Score():
                    # What is cached already tells nothing: it is computed again.
                    self._cache.roll_back(sequence, min(sequence.cached, work.start - 1))
                    self.tasks[sequence.number] = ScoreTask(sequence, work.start, arrived)
                case Propose():
                    room = min(sequence.limit, self._max_length) - len(sequence.tokens)
                    self._propose(self._draft_ahead.propose(sequence, work, room, arrived, ahead))
            sequence.is_free = isinstance(work, Generate)
            sequence.verified_round = work.round if isinstance(work, Verify) else None

    def finish(self, task: Task) -> None:
        """It is done: begins with what comes after it without anybody asking."""
        running = self._draft_ahead.unfinished if isinstance(task, PrepareTask) else self.tasks
        del running[task.sequence.number]
        if isinstance(task, ProposeTask):
            self._draft_ahead.prepare(task)
        elif isinstance(task, VerifyTask):
            self._go_on(task.sequence)

    def goes_on(self, task: VerifyTask, draft: Draft) -> bool:
        """Verifies the Draft that comes with its Verdict, if it may be before the sender has seen it.

        Not by blocks: such a Verdict has read the round's noise of all positions of its Draft, also beyond
        where it fell.
        """
        sequence = task.sequence
        is_free = sequence.number not in self.tasks  # nothing was sent ahead of it
        may = is_free and bool(draft) and len(sequence.tokens) < task.following.until
        may = may and sequence.sampling.verification != "block"
        if may:
            self._verify(sequence, draft, task.round, self._clock(), task.following)
        return may

    def void(self, sequence: EngineSequence) -> None:
        """Forgets all that is under way for it."""
        self.tasks.pop(sequence.number, None)
        self._draft_ahead.forget(sequence)
        sequence.ahead = None
        self.ready = [result for result in self.ready if result.sequence != sequence.number]

    def fits(self, length: int) -> bool:
        """Whether so many tokens fit into the whole cache."""
        return self._cache.blocks_for(length) <= self._cache.pool.num_blocks

    def _propose(self, task: ProposeTask) -> None:
        sequence = task.sequence
        reads = task.work.depth == 0 and sequence.cached < len(sequence.tokens) <= self._max_length
        if task.nodes() or reads:
            self.tasks[sequence.number] = task
        else:
            self.ready.append(task.result())
            self._draft_ahead.prepare(task)

    def _verify(
        self,
        sequence: EngineSequence,
        draft: Draft,
        round: int,
        arrived: float,
        following: Following = NOTHING_FOLLOWS,
    ) -> None:
        length = len(sequence.tokens)
        if not self.fits(length + len(draft)):
            draft = NO_DRAFT
        room = sequence.limit - length
        task = VerifyTask(sequence, draft, round, room, self._vocab_size, arrived, following)
        self.tasks[sequence.number] = task

    def _extend(self, sequence: EngineSequence, work: Extend) -> None:
        sequence.ahead = work.base + len(work.tokens), work.draft
        self._go_on(sequence)
        if sequence.number in self.tasks:
            self._batch_delay.left(sequence)  # it was not away for a Draft

    def _go_on(self, sequence: EngineSequence) -> None:
        """Verifies the Draft that follows the newest Verdict, if that was foreseen."""
        if sequence.ahead is None or sequence.number in self.tasks or sequence.has_ended:
            return
        base, draft = sequence.ahead
        following = draft.after(sequence.tokens[base:])
        if following:
            assert sequence.verified_round is not None
            self._verify(sequence, following, sequence.verified_round, self._clock())

    def _top_up(self, sequence: EngineSequence, work: TopUp) -> None:
        length = work.base + len(work.tokens) + work.count
        task = self.tasks.get(sequence.number)
        if isinstance(task, GenerateTask):
            task.length = max(task.length, length)
        elif isinstance(task, VerifyTask):
            task.following = Following(work.next_depth, work.next_leaves, length)
        elif not sequence.is_free:
            return  # its Verdict, which the sender will see, says that the target waits
        elif len(sequence.tokens) < length and not sequence.has_ended:
            self.tasks[sequence.number] = GenerateTask(sequence, length, self._clock())

    @staticmethod
    def _unseen(sequence: EngineSequence, work: Verify) -> list[int]:
        """Tokens that it decoded freely beyond those that the sender had seen.

        They stand, as they are what the verification of any Draft would say; not under
        rejection sampling or block verification, which accept others too.
        """
        held = sequence.tokens[work.base :]
        told = len(work.tokens)
        stand = sequence.is_free and sequence.sampling.verification == "coupled"
        return held[told:] if stand and held[:told] == list(work.tokens) else []

    def _commit(self, sequence: EngineSequence, base: int, tokens: tuple[int, ...]) -> None:
        """Makes ``tokens`` follow the first ``base``; keeps the cache of all that agrees, drafted or not."""
        held = sequence.tokens[base:]
        if held != list(tokens[: len(held)]):
            self._cache.roll_back(sequence, base + agreed(held, tokens))
        else:
            new = tokens[len(held) :]
            path = sequence.pending.path_of(new)
            keep = self._cache.keep_branch if len(path) == len(new) else self._cache.keep_path
            keep(sequence, path)
        sequence.tokens[base:] = tokens
        if base < sequence.prompt_length:
            sequence.prompt = np.array(sequence.tokens[: sequence.prompt_length], np.int64)
