"""Queue of submitted work: each piece becomes a task of its sequence, or a result at once."""

from collections.abc import Callable

import numpy as np

from outrider.decoding.draft import Draft
from outrider.decoding.lease import NO_LEASE, Lease
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.draft_ahead import DraftAhead
from outrider.engine.scheduling.batch_delay import BatchDelay
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.audit import AuditTask
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.propose import ProposeTask
from outrider.engine.tasks.score import ScoreTask
from outrider.engine.tasks.task import Task
from outrider.engine.work import Audit, Decode, Propose, Result, Score, Work
from outrider.learning.agreement import agreement


class WorkQueue:
    """Tasks, at most one per sequence. New work cancels old work, unless it is of the current round."""

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
            clock: returns the time in seconds; it gives the arrival time of work without a request.
        """
        self.tasks: dict[int, Task] = {}  # tasks by number of their sequence
        self.ready: list[Result] = []  # results known without a step
        self._cache = cache
        self._draft_ahead = draft_ahead
        self._batch_delay = batch_delay
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._clock = clock

    def submit(self, sequence: EngineSequence, work: Work, arrived: float) -> None:
        """Queues work that was checked. arrived: arrival time of the request by the clock."""
        target = sequence.target
        if isinstance(work, Decode) and work.round == target.round:
            self._merge(sequence, work)
            return
        self._batch_delay.returned(sequence, arrived)
        ahead = self._draft_ahead.observe(sequence, work) if isinstance(work, Propose) else None
        self.void(sequence)
        unseen = self._unseen(sequence, work)
        if not unseen:
            self._commit(sequence, work.base, work.tokens)
        target.round, target.is_plain = None, False
        match work:
            case Decode():
                target.round, target.is_plain = work.round, work.is_plain
                if not (unseen and sequence.has_ended):  # otherwise the sender will receive the end anyway
                    self._decode(sequence, work.draft.after(unseen), arrived, work.lease or NO_LEASE)
            case Score():
                # Cached tokens have no logits: they are computed again.
                self._cache.roll_back(sequence, min(sequence.cached, work.start - 1))
                self.tasks[sequence.number] = ScoreTask(sequence, work.start, arrived)
            case Audit():
                self._cache.roll_back(sequence, min(sequence.cached, sequence.prompt_length - 1))
                self.tasks[sequence.number] = AuditTask(sequence, arrived)
            case Propose():
                room = min(sequence.limit, self._max_length) - len(sequence.tokens)
                self._propose(self._draft_ahead.propose(sequence, work, room, arrived, ahead))

    def finish(self, task: Task) -> None:
        """Removes a finished task, and starts the work that follows without a request."""
        sequence = task.sequence
        if isinstance(task, DecodeTask):
            del self.tasks[sequence.number]
            if sequence.target.ahead is not None:
                self._verify_ahead(sequence)
        elif isinstance(task, PrepareTask):
            del self._draft_ahead.unfinished[sequence.number]
        else:
            del self.tasks[sequence.number]
            if isinstance(task, ProposeTask):
                self._draft_ahead.prepare(task)

    def next_round(self, task: DecodeTask, draft: Draft) -> DecodeTask:
        """Returns a task for the round after a task's round; the new task is not queued yet."""
        assert task.sequence.target.round is not None
        return DecodeTask(
            task.sequence, draft, task.sequence.target.round, self._vocab_size, self._clock(), task.lease
        )

    def begin_next_round(self, task: DecodeTask, draft: Draft, launched: DecodeTask | None = None) -> bool:
        """Starts to verify the Draft that comes with a Verdict before the sender has seen it, if allowed.

        Block verification forbids it: its Verdict has used the round's noise at all positions of its Draft,
        including those after the accepted tokens.

        launched: task of this next round, if its pass was launched early; else None.

        Returns:
            whether the verification was started.
        """
        sequence = task.sequence
        is_free = sequence.number not in self.tasks  # no Draft was sent ahead of the Verdict
        may = is_free and bool(draft) and len(sequence.tokens) < task.lease.until
        may = may and sequence.sampling.verification != "block"
        if may and launched is not None and launched.take_draft(draft, self._clock()):
            self.tasks[sequence.number] = launched
        elif may:
            self._decode(sequence, draft, self._clock(), task.lease)
        return may

    def void(self, sequence: EngineSequence) -> None:
        """Cancels all work of the sequence."""
        self.tasks.pop(sequence.number, None)
        self._draft_ahead.forget(sequence)
        sequence.target.ahead = None
        self.ready = [result for result in self.ready if result.sequence != sequence.number]

    def fits(self, length: int) -> bool:
        """Whether this number of tokens fits into the whole cache."""
        return self._cache.blocks_for(length) <= self._cache.pool.num_blocks

    def _propose(self, task: ProposeTask) -> None:
        sequence = task.sequence
        reads = task.work.depth == 0 and sequence.cached < len(sequence.tokens) <= self._max_length
        if task.nodes() or reads:
            self.tasks[sequence.number] = task
        else:
            self.ready.append(task.result())
            self._draft_ahead.prepare(task)

    def _decode(self, sequence: EngineSequence, draft: Draft, arrived: float, lease: Lease) -> None:
        target = sequence.target
        assert target.round is not None
        draft = draft.leading(self._cache.most_nodes)
        if not self.fits(len(sequence.tokens) + len(draft)):
            draft = NO_DRAFT
        self.tasks[sequence.number] = DecodeTask(
            sequence, draft, target.round, self._vocab_size, arrived, lease, target.is_plain
        )

    def _merge(self, sequence: EngineSequence, work: Decode) -> None:
        """Applies a Decode of the current round, which renews the lease or sends a Draft ahead."""
        task = self.tasks.get(sequence.number)
        if work.lease is not None:
            if isinstance(task, DecodeTask):
                task.lease = task.lease.renewed(work.lease)
            elif sequence.target.is_plain and self._is_within(sequence, work.lease):
                self._decode(sequence, NO_DRAFT, self._clock(), work.lease)
            # Otherwise the target waits, and the sender will see that in the Verdict.
        if work.draft:
            sequence.target.ahead = work.base + len(work.tokens), work.draft
            self._verify_ahead(sequence)
            if sequence.number in self.tasks:
                self._batch_delay.left(sequence)  # the sequence did not wait for a Draft

    @staticmethod
    def _is_within(sequence: EngineSequence, lease: Lease) -> bool:
        return len(sequence.tokens) < lease.until and not sequence.has_ended

    def _verify_ahead(self, sequence: EngineSequence) -> None:
        """Starts to verify the Draft that was sent ahead, if it follows the newest Verdict."""
        ahead = sequence.target.ahead
        if ahead is None or sequence.number in self.tasks or sequence.has_ended:
            return
        base, draft = ahead
        following = draft.after(sequence.tokens[base:])
        if following:
            self._decode(sequence, following, self._clock(), NO_LEASE)

    @staticmethod
    def _unseen(sequence: EngineSequence, work: Work) -> list[int]:
        """Returns tokens of plain decoding that the sender of a Draft did not know yet.

        They are kept, as coupled verification of any Draft would produce the same tokens. Rejection sampling
        and block verification may accept different tokens, so for them the result is empty.
        """
        if not isinstance(work, Decode) or work.is_plain:
            return []
        held = sequence.tokens[work.base :]
        told = len(work.tokens)
        stand = sequence.target.is_plain and sequence.sampling.verification == "coupled"
        return held[told:] if stand and held[:told] == list(work.tokens) else []

    def _commit(self, sequence: EngineSequence, base: int, tokens: tuple[int, ...]) -> None:
        """Replaces the tokens after the first ``base`` by ``tokens``.

        Tokens that match, committed or drafted, stay in the cache.
        """
        held = sequence.tokens[base:]
        if held != list(tokens[: len(held)]):
            self._cache.roll_back(sequence, base + agreement(held, tokens).correct)
        else:
            new = tokens[len(held) :]
            path = sequence.pending.path_of(new)
            keep = self._cache.keep_branch if len(path) == len(new) else self._cache.keep_path
            keep(sequence, path)
        sequence.tokens[base:] = tokens
        if base < sequence.prompt_length:
            sequence.prompt = np.array(sequence.tokens[: sequence.prompt_length], np.int64)
