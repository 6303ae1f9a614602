"""One model and the sequences it works on: continuous batching over a paged cache."""

import logging
import time
from dataclasses import replace

import numpy as np
import torch

from outrider.decoding.draft import Draft, agreed
from outrider.decoding.settings import Sampling
from outrider.drafters.registry import Place, drafter
from outrider.engine.blame import BlamedError, blaming, reason_of, says_broken
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.draft_ahead import DraftAhead
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.forward.batch import Item
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loading.weights import context_length, end_of_sequence
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.memory import free_memory
from outrider.engine.runner import Runner, StepTimings
from outrider.engine.sampler import Choices
from outrider.engine.scheduling.batch_delay import BatchDelay
from outrider.engine.scheduling.scheduler import Scheduler, Selected
from outrider.engine.sequence import NO_DRAFT, Sequence
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.generate import GenerateTask
from outrider.engine.tasks.propose import ProposeTask
from outrider.engine.tasks.task import Task
from outrider.engine.tasks.verify import VerifyTask
from outrider.engine.validation import check_sampling, check_work
from outrider.engine.work import (
    AheadOutcome,
    Extend,
    Failed,
    Generate,
    Load,
    Propose,
    Result,
    TopUp,
    Verified,
    Verify,
    Work,
)

logger = logging.getLogger(__name__)


class Engine:
    """Target or draft: one model, on one device or as rank 0 of several. One thread makes it and drives it.

    ``submit`` work, call ``step`` while ``has_work``, close what was opened. A sequence has one piece of
    work at a time: a new one voids the old.
    """

    def __init__(self, settings: EngineSettings, group: RankGroup | None = None) -> None:
        """
        group: this process is its rank 0; where ``settings.tensor_parallel`` is more than 1.

        Raises:
            UnsupportedModelError: the checkpoint cannot run here, with the reason.
            CacheTooSmallError: the memory budget buys no block.
        """
        self._group = group
        beside = None if settings.drafter is None else drafter(settings.drafter)
        if beside is not None and beside.place is not Place.TARGET_WORKER:
            raise ValueError(
                f"drafter={settings.drafter!r} runs in the {beside.place.value}, not beside a target"
            )
        self._forward = ForwardPass(settings, group, beside.hidden_layers if beside else ())
        self.settings = self._forward.settings
        self.load_timings = self._forward.load_timings
        self._model = self._forward.model
        self._cache = self._forward.cache
        self.vocab_size: int = self._model.config.get_text_config().vocab_size
        self._context_length = context_length(self._model)
        self.max_length = min(self._context_length, self._cache.capacity)  # tokens of the longest sequence
        self.eos_token_ids = end_of_sequence(self._model)
        self._scheduler = Scheduler(settings, self._cache)
        self._batch_delay = BatchDelay()
        self._runner = Runner(self._forward, group, self._batch_delay)
        self._sequences: dict[int, Sequence] = {}  # by number, oldest first
        self._tasks: dict[int, Task] = {}  # by number of their sequence
        self._draft_ahead = DraftAhead(settings.draft_ahead)
        self._beside: Drafter | None = beside.load()(self._model) if beside else None
        self._ready: list[Result] = []  # known without a step
        self._opened = 0

    def open(
        self, prompt_length: int, noise_key: int, sampling: Sampling, number: int | None = None
    ) -> Sequence:
        """A sequence without tokens; it takes up cache once work is submitted for it.

        number: by which work names it, above those of all that were opened before; None: the next one.

        Raises:
            ValueError: the sampling settings do not suit this model's vocabulary.
        """
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        ends = eos.union(sampling.stop_token_ids)
        check_sampling(sampling, self.vocab_size, ends)
        limit = min(prompt_length + sampling.max_tokens, self._context_length)
        number = self._opened if number is None else number
        sequence = Sequence(number, prompt_length, noise_key, sampling, ends, limit)
        sequence.acceptance_rate = self._draft_ahead.acceptance_rate
        self._opened = number + 1
        self._sequences[sequence.number] = sequence
        return sequence

    def sequence(self, number: int) -> Sequence:
        """That is open. Raises KeyError."""
        return self._sequences[number]

    def close(self, sequence: Sequence) -> None:
        """Voids its work and frees its cache. Closing twice does nothing more."""
        if self._sequences.pop(sequence.number, None) is not None:
            self._batch_delay.left(sequence)
            self._void(sequence)
            self._cache.release(sequence)
            if self._beside is not None:
                self._beside.forget(sequence)

    def fail(self, sequence: Sequence, error: BaseException) -> Failed:
        """Closes a sequence that cannot go on, and says so."""
        logger.error("sequence %d fails: %r", sequence.number, error, exc_info=error)
        self._cache.discard(sequence)
        self.close(sequence)
        return Failed(sequence.number, reason_of(error))

    def shut_down(self) -> None:
        """After the last step: lets the other ranks of its group go."""
        if self._group is not None:
            self._group.dismiss()

    @property
    def last_step(self) -> StepTimings | None:
        """Where the time of the newest step went."""
        return self._runner.last_step

    @property
    def has_work(self) -> bool:
        return bool(self._tasks or self._ready or self._draft_ahead.unfinished)

    def free_memory(self) -> int:
        """Bytes of the device's memory that nobody has taken."""
        return free_memory(self._model.device)

    def load(self) -> Load:
        """How busy the engine is."""
        running = sum(bool(task.sequence.blocks) for task in self._tasks.values())
        pool = self._cache.pool
        return Load(
            decoding=sum(
                bool(sequence.blocks) and len(sequence.tokens) > sequence.prompt_length
                for sequence in self._sequences.values()
            ),
            running=running,
            waiting=len(self._tasks) - running,
            free_blocks=pool.available,
            total_blocks=pool.num_blocks,
        )

    def patience(self) -> float:
        """Seconds that the next step should wait for sequences between two rounds; 0: none."""
        tasks = self._tasks.values()
        if self._ready or not all(isinstance(task, VerifyTask) for task in tasks):
            return 0.0  # who decodes freely would lose what the others gain
        return self._batch_delay.patience([task.num_tokens for task in tasks])

    def submit(self, work: Work, arrived: float | None = None) -> None:
        """Takes on work for an open sequence.

        arrived: when it was asked for, by time.perf_counter; None: now. Timings count from there.

        Raises:
            ValueError: the work contradicts its sequence; the message says how.
            CacheTooSmallError: the sequence may outgrow the whole cache. (A Propose gets an empty Draft.)
        """
        sequence = self._sequences.get(work.sequence)
        if sequence is None:
            raise ValueError(f"sequence {work.sequence} is closed: open another")
        check_work(sequence, work, self.vocab_size)
        if not isinstance(work, Propose) and not self._fits(sequence.limit):
            raise CacheTooSmallError(
                f"{sequence.limit} tokens of prompt and output do not fit into the cache, which holds "
                f"{self._cache.capacity}"
            )
        arrived = time.perf_counter() if arrived is None else arrived
        if isinstance(work, TopUp):
            self._top_up(sequence, work)
        elif isinstance(work, Extend):
            self._extend(sequence, work)
        else:
            self._batch_delay.returned(sequence, arrived)
            ahead = self._draft_ahead.observe(sequence, work) if isinstance(work, Propose) else None
            self._void(sequence)
            self._commit(sequence, work.base, work.tokens)
            self._start(sequence, work, arrived, ahead)
            sequence.is_free = isinstance(work, Generate)
            sequence.verified_round = work.round if isinstance(work, Verify) else None

    def _start(
        self,
        sequence: Sequence,
        work: Verify | Generate | Propose,
        arrived: float,
        ahead: AheadOutcome | None,
    ) -> None:
        length = len(sequence.tokens)
        if isinstance(work, Verify):
            self._verify(sequence, work.draft, work.round, arrived, (work.next_depth, work.next_leaves))
        elif isinstance(work, Generate):
            self._tasks[sequence.number] = GenerateTask(sequence, length + work.count, arrived)
        else:
            room = min(sequence.limit, self.max_length) - length
            task = self._draft_ahead.propose(sequence, work, room, arrived, ahead)
            if task.nodes() or (work.depth == 0 and sequence.cached < length <= self.max_length):
                self._tasks[sequence.number] = task
            else:
                self._ready.append(task.result())
                self._draft_ahead.prepare(task)

    def _verify(
        self,
        sequence: Sequence,
        draft: Draft,
        round: int,
        arrived: float,
        following: tuple[int, int] = (0, 0),
    ) -> None:
        """following: depth and leaves of the Draft that is to come with the Verdict."""
        length = len(sequence.tokens)
        if not self._fits(length + len(draft)):
            draft = NO_DRAFT
        room = sequence.limit - length
        task = VerifyTask(sequence, draft, round, room, self.vocab_size, arrived, following)
        self._tasks[sequence.number] = task

    def _extend(self, sequence: Sequence, work: Extend) -> None:
        sequence.ahead = work.base + len(work.tokens), work.draft
        self._go_on(sequence)
        if sequence.number in self._tasks:
            self._batch_delay.left(sequence)  # it was not away for a Draft

    def _go_on(self, sequence: Sequence) -> None:
        """Verifies the Draft that follows the newest Verdict, if that was foreseen."""
        if sequence.ahead is None or sequence.number in self._tasks or sequence.has_ended:
            return
        base, draft = sequence.ahead
        following = draft.after(sequence.tokens[base:])
        if following:
            assert sequence.verified_round is not None
            self._verify(sequence, following, sequence.verified_round, time.perf_counter())

    def _top_up(self, sequence: Sequence, work: TopUp) -> None:
        length = work.base + len(work.tokens) + work.count
        task = self._tasks.get(sequence.number)
        if isinstance(task, GenerateTask):
            task.length = max(task.length, length)
        elif len(sequence.tokens) < length and not sequence.has_ended:
            self._tasks[sequence.number] = GenerateTask(sequence, length, time.perf_counter())

    def _commit(self, sequence: Sequence, base: int, tokens: tuple[int, ...]) -> None:
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

    def _void(self, sequence: Sequence) -> None:
        self._tasks.pop(sequence.number, None)
        self._draft_ahead.forget(sequence)
        sequence.ahead = None
        self._ready = [result for result in self._ready if result.sequence != sequence.number]

    def _fits(self, length: int) -> bool:
        return self._cache.blocks_for(length) <= self._cache.pool.num_blocks

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """One forward pass over everything that may take part; returns what it completed.

        A sequence with which the pass raises, or whose numbers are not finite, fails alone: the others go on.

        Raises:
            Exception: the device or the process is broken; see engine.blame.
        """
        if self._ready:
            results, self._ready = self._ready, []
            return results
        try:
            selected = self._select()
        except BlamedError as blamed:
            return [self.fail(blamed.sequence, blamed.__cause__ or blamed)]
        if not selected:
            return []
        outcome = self._runner.run(selected)
        results = self._draft_beside(self._take(outcome.chosen))
        return results + [self.fail(sequence, error) for sequence, error in outcome.blamed]

    def _select(self) -> Selected:
        """Who takes part: all that is waited for, or else what is prepared."""
        if self._tasks:
            return self._scheduler.select(self._tasks, self._sequences)
        selected = self._scheduler.select_idle(self._draft_ahead.unfinished)
        if not selected:
            self._draft_ahead.unfinished.clear()  # there is no cache to spare
        return selected

    def _take(self, chosen: list[tuple[Task, Item, Choices]]) -> list[Result]:
        """What the pieces of work make of their tokens; begins with what comes after those that are done."""
        results: list[Result] = []
        for task, item, choices in chosen:
            try:
                with blaming(item.sequence):
                    results += self._advance(task, item, choices)
            except BlamedError as blamed:
                results.append(self.fail(item.sequence, blamed.__cause__ or blamed))
        self._batch_delay.answered(
            self._sequences[result.sequence]
            for result in results
            if isinstance(result, Verified) and result.finish is None and result.sequence not in self._tasks
        )
        return results

    def _draft_beside(self, results: list[Result]) -> list[Result]:
        """With the Drafts that were asked for, from the drafter beside this target."""
        wanted = [
            (index, result.asked)
            for index, result in enumerate(results)
            if isinstance(result, Verified) and result.asked is not None and result.finish is None
        ]
        if self._beside is None or not wanted:
            return results
        try:
            drafts = self._beside.propose([asked for _, asked in wanted])
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("the drafter beside the target failed: its Drafts are missing")
            return results
        for (index, _), draft in zip(wanted, drafts, strict=True):
            result = results[index]
            assert isinstance(result, Verified)
            results[index] = replace(result, draft=draft)
        return results

    def _advance(self, task: Task, item: Item, choices: Choices) -> list[Result]:
        sequence = item.sequence
        results: list[Result] = []
        sequence.cached += item.num_committed
        if sequence.cached == len(sequence.tokens):
            sequence.pending = task.tree()
            results = task.take(choices, self._cache)
        self._cache.publish(sequence)
        if not all(choices.are_sound):  # of what was drafted: nobody is to read it again
            self._cache.roll_back(sequence, sequence.cached)
            self._cache.clear(sequence, sequence.cached)
        if task.done:
            self._finish(task)
        return results

    def _finish(self, task: Task) -> None:
        """What comes after a piece of work, without anybody asking."""
        running = self._draft_ahead.unfinished if isinstance(task, PrepareTask) else self._tasks
        del running[task.sequence.number]
        if isinstance(task, ProposeTask):
            self._draft_ahead.prepare(task)
        elif isinstance(task, VerifyTask):
            self._go_on(task.sequence)
