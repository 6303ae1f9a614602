"""One model and the sequences it works on: continuous batching over a paged cache."""

import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from msgspec import structs

from outrider.decoding.grammar import GrammarError
from outrider.decoding.outcomes import Branch
from outrider.decoding.settings import Sampling
from outrider.drafters.known_texts import NO_TEXTS, KnownTexts
from outrider.drafters.registry import row_of
from outrider.engine.adapters.adapters import Adapters
from outrider.engine.adapters.held_adapters import HeldAdapters
from outrider.engine.blame import BlamedError, reason_of, says_broken
from outrider.engine.choosing.sampler import Choices
from outrider.engine.draft_ahead.draft_ahead import DraftAhead
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.forward.batch import Item
from outrider.engine.loop.blame_search import BlameSearch, Outcome
from outrider.engine.loop.grammars import Grammars
from outrider.engine.loop.launched import Launched, Reach
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.loop.rounds_ahead import RoundsAhead, RoundsAheadPlanner
from outrider.engine.loop.runner import ModelRunner, Runner
from outrider.engine.loop.target_drafting import TargetDrafting
from outrider.engine.loop.validation import check_sampling, check_work
from outrider.engine.loop.work_queue import WorkQueue
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.scheduling.batch_delay import BatchDelay
from outrider.engine.scheduling.scheduler import Scheduler, Selected
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.step_timings import StepTimings
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import Task
from outrider.engine.work import NONE_ASKED, AskedAdapter, Decoded, EngineLoad, Failed, Propose, Result, Work

logger = logging.getLogger(__name__)


class Engine:
    """Engine of a target or a draft: one model, on one device or as rank 0 of several.

    It is not thread-safe: one thread creates and drives it.

    ``open`` a sequence, ``submit`` work for it, call ``step`` while ``has_work``, and ``close`` the sequence.
    A sequence has one piece of work at a time: new work cancels the old work.
    """

    def __init__(
        self,
        runner: Runner,
        drafters: TargetDrafters | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
        adapters: HeldAdapters | None = None,
    ) -> None:
        """
        Args:
            runner: runner of the model; ``from_settings`` makes it from a checkpoint.
            drafters: target drafters; None: no target drafters.
            grammars: grammars over the model's vocabulary; None: a sequence with a grammar is refused.
            clock: returns the time in seconds.
            adapters: LoRA adapters; None: no adapters.
        """
        self.runner = runner
        self._search = BlameSearch(runner)
        self.settings = runner.settings
        self.vocab_size = runner.vocab_size
        self._cache = runner.cache
        self.max_length = min(runner.context_length, self._cache.capacity)  # tokens of the longest sequence
        self._clock = clock
        self._scheduler = Scheduler(self.settings, self._cache)
        self._batch_delay = BatchDelay(clock)
        self._sequences: dict[int, EngineSequence] = {}  # sequences by number, oldest first
        by_checkpoint = "model" if runner.mask_token is None else "parallel"
        row = row_of(self.settings.worker_drafter or by_checkpoint)
        branches = self.settings.draft_ahead
        assert branches is not None  # the load has resolved all settings
        self._draft_ahead = DraftAhead(branches, row.load()(runner.mask_token), goes_on=runner.launches_early)
        self._queue = WorkQueue(
            self._cache, self._draft_ahead, self._batch_delay, self.vocab_size, self.max_length, clock
        )
        drafters = drafters or TargetDrafters()
        self._has_drafters = bool(drafters)
        self._drafting = TargetDrafting(drafters, clock)
        self._rounds_ahead = RoundsAheadPlanner(
            self._cache, self.settings, self.max_length, self._queue.next_round
        )
        self._launched: Launched | None = None  # next step, if it was launched early
        self._grammars = grammars or Grammars(None, runner.vocab_size, runner.end_token_ids)
        self._adapters = adapters or HeldAdapters(Adapters({}), self.settings)
        self._opened = 0

    @classmethod
    def from_settings(cls, settings: EngineSettings, group: RankGroup | None = None) -> "Engine":
        """Returns the engine of a checkpoint.

        group: group whose rank 0 is this process; None if ``settings.tensor_parallel`` is 1.

        Raises:
            UnsupportedModelError: the checkpoint cannot run here, with the reason.
            CacheTooSmallError: the memory budget is smaller than one block.
        """
        drafters = TargetDrafters.of(settings)
        forward = load_forward_pass(settings, group, drafters)
        runner = ModelRunner(forward, group)
        adapters = HeldAdapters(forward.adapters, forward.settings, group)
        return cls(runner, drafters, _grammars_of(runner), adapters=adapters)

    def open(
        self,
        prompt_length: int,
        noise_key: int,
        sampling: Sampling,
        number: int | None = None,
        adapter: AskedAdapter = NONE_ASKED,
        texts: KnownTexts = NO_TEXTS,
    ) -> EngineSequence:
        """Opens a sequence without tokens. It holds no cache until work is submitted for it.

        Args:
            number: number of the sequence, above all numbers before it; None: the next number.
            adapter: adapter of the sequence, which is loaded if it is missing.
            texts: texts from which its index drafters guess.

        Raises:
            ValueError: the sampling settings do not fit the model's vocabulary, or the adapter's name is
                unknown.
            UnsupportedModelError: the adapter cannot be loaded.
        """
        eos = frozenset[int]() if sampling.ignore_eos else self.runner.end_token_ids
        ends = eos.union(sampling.stop_token_ids)
        check_sampling(sampling, self.vocab_size, ends)
        limit = min(prompt_length + sampling.max_tokens, self.runner.context_length)
        number = self._opened if number is None else number
        sequence = EngineSequence(
            number,
            prompt_length,
            noise_key,
            sampling,
            ends,
            limit,
            self._clock,
            self._adapters.hold(adapter),
            texts,
        )
        try:
            self._grammars.begin(sequence)
        except Exception:
            self._adapters.release(sequence.adapter)
            raise
        sequence.draft.acceptance_rate = self._draft_ahead.acceptance_rate
        self._opened = number + 1
        self._sequences[sequence.number] = sequence
        return sequence

    def sequence(self, number: int) -> EngineSequence:
        """Returns the open sequence with this number. Raises KeyError if there is none."""
        return self._sequences[number]

    def close(self, sequence: EngineSequence) -> None:
        """Cancels a sequence's work and frees its cache. Closing is idempotent."""
        if self._sequences.pop(sequence.number, None) is not None:
            self._batch_delay.left(sequence)
            self._grammars.forget(sequence)
            self._queue.void(sequence)
            self._cache.release(sequence)
            if not self._queue.tasks:
                self._launched = None
            self._drafting.forget(sequence)
            self._adapters.release(sequence.adapter)

    def load_adapter(self, asked: AskedAdapter) -> bytes:
        """Loads an adapter at all ranks; returns the digest of its files.

        Raises:
            UnsupportedModelError: the adapter cannot be used, with the reason.
        """
        return self._adapters.load(asked)

    def drop_adapter(self, digest: bytes) -> None:
        """Drops an adapter as soon as no open sequence uses it."""
        self._adapters.drop(digest)

    def fail(self, sequence: EngineSequence, error: BaseException) -> Failed:
        """Closes a sequence that cannot continue, and returns its last result."""
        logger.error("sequence %d fails: %r", sequence.number, error, exc_info=error)
        self._cache.discard(sequence)
        self.close(sequence)
        return Failed(sequence.number, reason_of(error), isinstance(error, GrammarError))

    def warm_up(self) -> None:
        """Starts the grammar sandbox early, so that no grammar has to wait for it. Does not block."""
        self._grammars.warm_up()

    def shut_down(self) -> None:
        """Stops the grammar threads and dismisses the other ranks, after the last step."""
        self._grammars.shut_down()
        self.runner.shut_down()

    @property
    def last_step(self) -> StepTimings | None:
        """Timings of the newest step; None before the first step."""
        return self.runner.last_step

    @property
    def has_work(self) -> bool:
        return bool(self._queue.tasks or self._queue.ready or self._draft_ahead.unfinished)

    def alternatives(self, sequence: EngineSequence, depth: int, count: int) -> list[Branch]:
        """Returns at most ``count`` alternatives for a sequence's next Draft, the likeliest to be correct."""
        return self._draft_ahead.alternatives(sequence, depth, count)

    def works_on(self, sequence: EngineSequence) -> bool:
        """Whether the sequence has unfinished work."""
        return sequence.number in self._queue.tasks

    def load(self) -> EngineLoad:
        """Returns the load of the engine."""
        running = sum(bool(task.sequence.blocks) for task in self._queue.tasks.values())
        pool = self._cache.fullest_pool
        return EngineLoad(
            decoding=sum(
                bool(sequence.blocks) and len(sequence.tokens) > sequence.prompt_length
                for sequence in self._sequences.values()
            ),
            running=running,
            waiting=len(self._queue.tasks) - running,
            free_blocks=pool.available,
            total_blocks=pool.num_blocks,
            no_drafts_because=self._drafting.no_drafts_because,
        )

    def patience(self) -> float:
        """Returns how many seconds the next step should wait for sequences that are between two rounds."""
        tasks = [task for task in self._queue.tasks.values() if not task.yields]
        if self._launched or self._queue.ready or not (tasks and all(map(_verifies, tasks))):
            return 0.0  # a step is launched or has results, or waiting would slow down plain decoding
        return self._batch_delay.patience([task.num_tokens for task in tasks])

    def submit(self, work: Work, arrived: float | None = None) -> None:
        """Queues work for an open sequence.

        arrived: arrival time of the request by the engine's clock, at which its timings start; None: now.

        Raises:
            ValueError: the work contradicts its sequence; the message says how.
            CacheTooSmallError: the sequence may outgrow the whole cache. (A Propose gets an empty Draft
                instead.)
        """
        sequence = self._sequences.get(work.sequence)
        if sequence is None:
            raise ValueError(f"sequence {work.sequence} is closed: open another")
        check_work(sequence, work, self.vocab_size)
        if not isinstance(work, Propose) and not self._queue.fits(sequence.limit):
            raise CacheTooSmallError(
                f"{sequence.limit} tokens of prompt and output do not fit into the cache, which holds "
                f"{self._cache.capacity}"
            )
        self._queue.submit(sequence, work, self._clock() if arrived is None else arrived)

    @torch.inference_mode()
    def step(self, is_interrupted: Callable[[], bool] | None = None) -> list[Result]:
        """Runs a forward pass over all tasks that can take part, and returns the completed results.

        If the pass raises for a sequence, or computes numbers that are not finite, only this sequence fails.
        If all tasks draft chains, the step drafts several positions. On a GPU it drafts all remaining
        positions of each chain, on a CPU as many as the shortest chain has left.

        is_interrupted: returns whether new work waits for the end of the step, which then drafts no further
            positions. None: no work can arrive during the step.

        Raises:
            Exception: the device or the process is broken; see engine.blame.
        """
        if self._queue.ready:
            results, self._queue.ready = self._queue.ready, []
            return results
        if uncompiled := self._grammars.take():
            return [self.fail(sequence, error) for sequence, error in uncompiled]
        try:
            selected = self._select()
        except BlamedError as blamed:
            return [self.fail(blamed.sequence, blamed.__cause__ or blamed)]
        if not selected:
            self._grammars.wait()
            return []
        foresees = self.runner.launches_early
        following = self._scheduler.select_next(selected, self._queue.tasks) if foresees else []
        positions = self._scheduler.positions(selected, self._queue.tasks)
        begin_drafts = partial(self._begin_drafts, selected) if self._has_drafters else None
        reach = Reach(positions, is_interrupted, begin_drafts)
        outcome = self._search.run(selected, self._launched, following, reach)
        self._launched = outcome.next_step
        self._observe(outcome)
        results = self._take(outcome.chosen)
        if self._has_drafters:
            results = self._continued(outcome, self._drafting.stepped(outcome.chosen, results))
        self._batch_delay.answered(
            [
                self._sequences[result.sequence]
                for result in results
                if isinstance(result, Decoded)
                and not result.is_plain
                and result.finish is None
                and result.sequence not in self._queue.tasks
            ]
        )
        return results + [self.fail(sequence, error) for sequence, error in outcome.blamed]

    def _begin_drafts(self, selected: Selected, launched: Launched) -> RoundsAhead | None:
        """Starts Drafts on the device; returns the next rounds if they can start on the device as well."""
        under_way = self._drafting.begin(selected, launched)
        if under_way is None or not self.runner.launches_early or len(selected) < len(self._queue.tasks):
            return None
        return self._rounds_ahead.after(selected, under_way)

    def _observe(self, outcome: Outcome) -> None:
        for step, tasks in outcome.passes:
            size = step.size
            logger.debug(
                "step %d: %d sequences, %d tokens and %d of prompts in %.2f ms",
                *(step.number, size.sequences, size.tokens, size.prompt_tokens, 1e3 * step.seconds),
            )
            if any(map(_verifies, tasks)):
                self._batch_delay.stepped(step)

    def _select(self) -> Selected:
        """Selects the items of the step launched early, or else of requested work, or else of draft-ahead."""
        if self._launched is not None:
            if selected := self._scheduler.still_wanted(self._launched.tasks, self._queue.tasks):
                return selected
            self._launched = None
        if tasks := self._grammars.ready(self._queue.tasks):
            return self._scheduler.select(tasks, self._sequences)
        selected = self._scheduler.select_idle(self._draft_ahead.unfinished)
        if not selected:
            self._draft_ahead.unfinished.clear()  # there is no spare cache for draft-ahead
        return selected

    def _take(self, chosen: list[tuple[Task, Item, Choices]]) -> list[Result]:
        """Gives each task its tokens, starts work that follows finished tasks, and returns the results."""
        results: list[Result] = []
        for task, item, choices in chosen:
            try:
                results += self._advance(task, item, choices)
            except Exception as error:
                if says_broken(error):
                    raise
                results.append(self.fail(item.sequence, error))
        return results

    def _continued(self, outcome: Outcome, results: list[Result]) -> list[Result]:
        """Starts the next rounds with the Drafts of these results, if allowed; returns the results."""
        following = outcome.next_step.tasks if outcome.next_step else ()
        launched = {task.sequence: task for task in following if isinstance(task, DecodeTask)}
        verified = {
            task.sequence.number: task for task, _, _ in outcome.chosen if isinstance(task, DecodeTask)
        }
        continued = list[Result]()
        for result in results:
            if isinstance(result, Decoded) and result.draft is not None:
                task = verified[result.sequence]
                ahead = launched.get(task.sequence) if self._drafting.foresaw(task.sequence) else None
                continues = self._queue.begin_next_round(task, result.draft, ahead)
                result = structs.replace(result, continues=continues)
            continued.append(result)
        return continued

    def _advance(self, task: Task, item: Item, choices: Choices) -> list[Result]:
        sequence = item.sequence
        results: list[Result] = []
        sequence.cached += item.num_committed
        if sequence.cached == len(sequence.tokens):
            sequence.pending = task.tree()
            results = task.take(choices, self._cache)
        elif item.num_logits:
            results = task.take(choices, self._cache)  # a Score or an Audit, in the middle of its tokens
        self._cache.publish(sequence)
        if not all(choices.are_valid):  # drafted tokens with numbers that are not finite leave the cache
            self._cache.roll_back(sequence, sequence.cached)
            self._cache.clear(sequence, sequence.cached)
        if task.done:
            self._queue.finish(task)
        return results


def _verifies(task: Task) -> bool:
    """Whether the task decodes in rounds, not plainly."""
    return isinstance(task, DecodeTask) and not task.is_plain


def _grammars_of(runner: ModelRunner) -> Grammars:
    return Grammars.of_checkpoint(runner.settings.model, runner.vocab_size, runner.end_token_ids)
