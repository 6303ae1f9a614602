"""Runs a step: packs its input, launches it on the device, and waits for its tokens."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import torch
from msgspec import structs

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.engine.blame import is_out_of_memory, says_broken
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.choosing_rows import ChoosingRows
from outrider.engine.choosing.drafted_tokens import DraftedTokens
from outrider.engine.choosing.sampler import Choosing, begin_choosing, choose_adjusted, compile_kernels
from outrider.engine.device_time import Mark, mark, wait_for
from outrider.engine.drafters.target_drafter import feed_of
from outrider.engine.forward.batch import Batch, Item
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.step_input import NO_ROUNDS, Feed, ForeseenRounds
from outrider.engine.loading.context import context_length
from outrider.engine.loading.special_tokens import end_of_sequence, mask_token
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.launched import ONE_POSITION, Finished, Launched, LogitRows, Pass, Reach
from outrider.engine.loop.rounds_ahead import RoundsAhead
from outrider.engine.parallel.rank_group import RankGroup, together
from outrider.engine.planning.memory import free_memory
from outrider.engine.planning.promise import Promise
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.sequence import NO_DRAFT, UNKNOWN
from outrider.engine.settings import EngineSettings
from outrider.engine.step_timings import StepTimings
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import StepPart, Task
from outrider.pace.step import Step, StepSize

if TYPE_CHECKING:
    from outrider.engine.forward.draft_graphs import DraftChains

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Interface of a model with its cache, as the engine uses it."""

    settings: EngineSettings  # settings with all open values resolved
    cache: PagedCache
    load_timings: LoadTimings
    slow_because: tuple[str, ...]  # on a GPU: a sentence for each missing optimization
    promise: Promise  # how far the same seed gives the same text
    last_step: StepTimings | None
    vocab_size: int
    context_length: int  # tokens
    end_token_ids: frozenset[int]
    mask_token: int | None  # mask token of a parallel draft model; None: the model is not parallel
    launches_early: bool  # whether a step can be launched before the host knows the previous step's tokens

    def run(
        self,
        selected: Selected,
        launched: Launched | None = None,
        following: Sequence[DecodeTask] = (),
        reach: Reach = ONE_POSITION,
    ) -> Finished:
        """Runs a step: feeds the items and chooses tokens.

        Args:
            launched: this step, if it was launched early; it may include sequences that have ended since.
            following: tasks of the next step, which is launched early.
            reach: limits of drafting for ``selected``, which have reserved cache for all its positions.

        Raises:
            Exception: the step failed; engine.blame classifies the error.
        """

    def free_memory(self) -> int:
        """Returns the free bytes of the device's memory."""

    def shut_down(self) -> None:
        """Dismisses the other ranks of its group after the last step."""


class ModelRunner:
    """Runner of a model on this process's device, alone or as rank 0 of a group."""

    def __init__(self, forward: ForwardPass, group: RankGroup | None) -> None:
        """group: process group whose rank 0 is this process; None: a single process."""
        self._forward = forward
        self._group = group
        self._steps = 0
        self.model = forward.model
        self.settings = forward.settings
        self.cache = forward.cache
        self.load_timings = forward.load_timings
        self.slow_because = forward.slow_because
        self.promise = forward.promise
        self.last_step: StepTimings | None = None
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.context_length = context_length(self.model)
        self.end_token_ids = end_of_sequence(self.model, forward.settings.model)
        self.mask_token = mask_token(self.model.config)
        self.launches_early = forward.is_asynchronous and not self.settings.shortest_step_s
        with self.load_timings.timed("graphs"):
            compile_kernels(self.vocab_size, self._forward.dtype, self._forward.device)

    def free_memory(self) -> int:
        """Returns the bytes of free memory of its device."""
        return free_memory(self._forward.device)

    def shut_down(self) -> None:
        """Dismisses the other ranks when the current step is finished, which includes their last exchange."""
        if self._group is not None:
            wait_for(mark(self._forward.device))
            self._group.dismiss()

    def run(
        self,
        selected: Selected,
        launched: Launched | None = None,
        following: Sequence[DecodeTask] = (),
        reach: Reach = ONE_POSITION,
    ) -> Finished:
        if self.settings.shortest_step_s:
            reach = replace(reach, positions=())
        launched, next_step = launched or self._launch(selected, reach), None
        if following:
            launched = launched.with_own_states()
            next_step = self._launch_early(partial(self._launch_after, launched, following))
        if isinstance(launched.choosing, Choosing) and reach.shortest > 1:
            further = self._launch_further(launched, selected, reach)
            launched = replace(launched, further=further, reached=[1 + len(further)] * len(selected))
        rounds = None if reach.begin_drafts is None else reach.begin_drafts(launched)
        if rounds is not None:
            launched = launched.with_own_states()
            next_step = self._launch_early(partial(self._launch_rounds, rounds))
            if next_step is None and rounds.foreseen.may_branch:
                return self.run(selected)  # the failed launch may have moved tokens in the cache
        finished = self._finish(launched, selected, next_step)
        if rounds is not None and rounds.foreseen.may_branch:
            moved = [structs.replace(choices, has_moved=True) for choices in finished.choices]
            finished = replace(finished, choices=moved)
        return finished

    def _launch(self, selected: Selected, reach: Reach) -> Launched:
        started = time.perf_counter()
        tasks, items = [task for task, _ in selected], [item for _, item in selected]
        feeds, fed = [item.feed() for item in items], [len(item.tokens) for item in items]
        counts = [item.num_logits for item in items]
        choosing = [count if task.chooses else 0 for task, count in zip(tasks, counts, strict=True)]
        drafts = [task.judged if count else NO_DRAFT for task, count in zip(tasks, choosing, strict=True)]
        reach = self._by_device(tasks, feeds, reach)
        forward = self._pass(feeds, self._choice_input(feeds, tasks, choosing, drafts, reach.positions))
        logits, rows = forward.output.logits, _rows_of(tasks, choosing, lambda place: tasks[place].rows())
        if reach.longest > 1:
            chains = self._begin_chains(forward, rows)
            arriving, ended, arrival = self._drafted(chains, reach)
            reached = [min(count, chains.positions) for count in reach.positions]
            drafted = DraftedTokens(rows, fed, reached, logits, arriving, arrival)
            return Launched(tasks, fed, replace(forward, ended=ended), drafted, started, reached=reached)
        ranks = min(max([task.ranks for task in tasks]), logits.shape[1])
        logit_rows = LogitRows(counts, choosing)
        chosen = logit_rows.choosing(logits)
        packed = forward.batch.choice
        output = forward.output
        begun = begin_choosing(chosen, rows, output.are_finite, ranks, drafts, packed, output.experts_read)
        return Launched(tasks, fed, forward, begun, started, logit_rows=logit_rows)

    def _by_device(self, tasks: Sequence[Task], feeds: Sequence[Feed], reach: Reach) -> Reach:
        """Returns how far the device may draft alone. Settings about single tokens need the host."""
        graphs = self._forward.draft_graphs
        if graphs is None or not graphs.fits(feeds):
            return ONE_POSITION
        pairs = zip(tasks, reach.positions, strict=False)  # ``positions`` may be empty
        return replace(
            reach, positions=[count if task.sequence.needs_no_text else 1 for task, count in pairs]
        )

    def _begin_chains(self, forward: Pass, rows: ChoosingRows) -> "DraftChains":
        """Chooses the first tokens of Drafts that the device continues alone. rows: a row for each task."""
        graphs, batch, output = self._forward.draft_graphs, forward.batch, forward.output
        assert graphs is not None
        assert isinstance(batch, Batch)
        assert batch.choice is not None
        choice = choose_adjusted(output.logits, rows, batch.choice, graphs.ranks)
        return graphs.begin(batch, output.are_finite, choice)

    def _drafted(self, chains: "DraftChains", reach: Reach) -> tuple[torch.Tensor, Mark, Mark]:
        """Launches further positions, until the longest chain is complete or other work arrives.

        Returns:
            ``DraftChains.found``, which is being copied to the host; the mark after the last position; the
            mark after the copy.
        """
        device = self._forward.device
        ended = mark(device)
        while chains.positions < reach.longest and not reach.is_interrupted_before(ended):
            chains.advance()
            ended = mark(device)
        arriving = chains.found.to("cpu", non_blocking=True)  # torch allocates pinned memory
        return arriving, ended, mark(device)

    def _launch_early(self, launch: Callable[[], Launched]) -> Launched | None:
        """Launches the next step, which feeds the tokens that this step chooses; None if that fails."""
        try:
            return launch()
        except Exception as error:
            if is_out_of_memory(error):
                self.launches_early = False
                logger.warning("out of memory for two steps at once: from now on each waits for the last")
                return None
            if says_broken(error):
                raise
            logger.warning("a step could not be launched early: %r", error, exc_info=error)
            return None

    def _launch_after(self, before: Launched, tasks: Sequence[DecodeTask]) -> Launched:
        started, rows = time.perf_counter(), {task: row for row, task in enumerate(before.tasks)}
        feeds = [feed_of(task.sequence, [rows[task]], len(task.sequence.tokens), 1) for task in tasks]
        choice = self._choice_input(feeds, tasks, [1] * len(tasks), [NO_DRAFT] * len(tasks))
        assert isinstance(before.choosing, Choosing)
        forward = self._pass(feeds, choice, before.choosing.tokens)
        output, packed = forward.output, forward.batch.choice
        next_rows = _rows_of(tasks, [1] * len(tasks), lambda place: [tasks[place].next_row()])
        finite, read = output.are_finite, output.experts_read
        choosing = begin_choosing(output.logits, next_rows, finite, packed=packed, experts_read=read)
        return Launched(tasks, [1] * len(tasks), forward, choosing, started, before.choosing.arrival)

    def _launch_rounds(self, rounds: RoundsAhead) -> Launched:
        """Launches the pass of the next rounds, whose Verdicts and Drafts only the device knows."""
        started, tasks, feeds = time.perf_counter(), rounds.tasks, [*rounds.feeds]
        counts, drafts = [len(feed.tokens) for feed in feeds], [task.tree() for task in tasks]
        choice = self._choice_input(feeds, tasks, counts, drafts)
        forward = self._pass(feeds, choice, rounds.chosen, rounds.foreseen)
        output, packed = forward.output, forward.batch.choice
        rows = _rows_of(tasks, counts, lambda place: tasks[place].rows())
        finite, read = output.are_finite, output.experts_read
        choosing = begin_choosing(
            output.logits, rows, finite, drafts=drafts, packed=packed, experts_read=read
        )
        return Launched(tasks, counts, forward, choosing, started, rounds.drafted)

    def _launch_further(self, launched: Launched, selected: Selected, reach: Reach) -> list[Launched]:
        """Launches further positions of a step."""
        steps = [launched]
        try:
            while len(steps) < reach.shortest and not self._ends_now(steps, selected, reach):
                steps.append(self._launch_position(steps[-1], selected, len(steps)))
        except Exception as error:
            if says_broken(error) and not is_out_of_memory(error):
                raise
            logger.warning("a step ends before position %d: %r", len(steps), error, exc_info=error)
        return steps[1:]

    def _ends_now(self, steps: list[Launched], selected: Selected, reach: Reach) -> bool:
        """Whether no position follows the positions that were launched."""
        newest = steps[-1].choosing
        assert isinstance(newest, Choosing)
        if not self._forward.is_asynchronous:
            pairs = zip(newest.result.top_tokens[:, 0].tolist(), selected, strict=True)
            if all(token in item.sequence.end_token_ids for token, (_, item) in pairs):
                return True
        return reach.is_interrupted_before(newest.arrival)

    def _launch_position(self, before: Launched, selected: Selected, position: int) -> Launched:
        """Launches a further position, which feeds the best tokens of the position ``before``.

        position: number of the position; 0 is the first position of the step.
        """
        assert isinstance(before.choosing, Choosing)
        started, result, chosen = time.perf_counter(), before.choosing.result, None
        ranks = result.top_tokens.shape[1]
        if self._forward.is_asynchronous:
            tokens, chosen = [ranks * row for row in range(len(selected))], before.choosing.tokens
        else:
            tokens = result.top_tokens[:, 0].tolist()
        feeds = [
            feed_of(item.sequence, [token], item.sequence.written + len(item.tokens) + position - 1, 1)
            for token, (_, item) in zip(tokens, selected, strict=True)
        ]
        count = len(feeds)
        choice = self._choice_input(feeds, before.tasks, [1] * count, [NO_DRAFT] * count)
        forward = self._pass(feeds, choice, chosen)
        rows = _rows_of(
            before.tasks,
            [1] * count,
            lambda place: [_further(row, position) for row in before.tasks[place].rows()],
        )
        output, packed = forward.output, forward.batch.choice
        choosing = begin_choosing(output.logits, rows, output.are_finite, ranks, packed=packed)
        return Launched(before.tasks, [1] * count, forward, choosing, started)

    def _choice_input(
        self,
        feeds: list[Feed],
        tasks: Sequence[Task],
        counts: list[int],
        drafts: list[Draft],
        positions: Sequence[int] = (),
    ) -> ChoiceInput | None:
        """Returns the input of the kernels that choose tokens; None: the device has no such kernels.

        Arguments as for ChoiceInput.of_feeds.
        """
        if not self._forward.is_asynchronous:
            return None
        return ChoiceInput.of_feeds(feeds, [task.sequence for task in tasks], counts, drafts, positions)

    def _pass(
        self,
        feeds: list[Feed],
        choice: ChoiceInput | None,
        chosen: torch.Tensor | None = None,
        rounds: ForeseenRounds = NO_ROUNDS,
    ) -> Pass:
        """Launches a forward pass. chosen: argument of feed_chosen."""
        fed = self._forward.step_of(feeds, rounds)
        with together(self._group, self._forward.tables, fed, chosen):
            batch = self._forward.prepare(fed, choice)
            built = time.perf_counter()
            started = mark(self._forward.device)
            output = self._forward.run(batch, chosen)
        return Pass(batch, output, built, started, mark(self._forward.device))

    def _finish(self, launched: Launched, selected: Selected, next_step: Launched | None) -> Finished:
        """Waits for the choices, and returns those of the selected tasks."""
        wait_for(launched.arrival)
        choices, of_tokens = launched.choosing.read()
        experts_read = choices[0].numbers.experts_read
        items, output, counts = [item for _, item in selected], launched.forward.output, launched.counts
        are_finite = None
        if not (all(of_tokens) and choices[0].numbers.are_all_valid):
            tokens = iter(of_tokens)
            are_finite = [[*islice(tokens, count)] for count in counts]
        if output.hidden is not None:
            of_each = output.hidden.split_with_sizes(counts)
            choices = [
                structs.replace(choice, hidden=states)
                for choice, states in zip(choices, of_each, strict=True)
            ]
        if launched.logit_rows is not None:
            choices = launched.logit_rows.with_logits(choices, output.logits)
        if len(selected) < len(launched.tasks):  # sequences have ended since the early launch
            places = {task: place for place, task in enumerate(launched.tasks)}
            kept = [places[task] for task, _ in selected]
            choices = [choices[place] for place in kept]
            are_finite = are_finite and [are_finite[place] for place in kept]
        if launched.further:
            choices = [
                structs.replace(choice, further=tokens)
                for choice, tokens in zip(choices, launched.further_tokens(), strict=True)
            ]
        for item, choice, positions in zip(items, choices, launched.reached, strict=False):
            known = 1 + len(choice.further)
            if known < positions:  # an attention mask does not hide numbers that are not finite
                self.cache.clear(item.sequence, item.sequence.written + len(item.tokens) + known - 1)
        shortest = self.settings.shortest_step_s
        if shortest:
            time.sleep(max(launched.started + shortest - time.perf_counter(), 0.0))
        now = time.perf_counter()
        self.last_step = timings = launched.timings(now)
        self._steps += 1
        size, positions = size_of(items, self.settings.block_size), launched.positions
        if positions > 1:
            size = replace(size, tokens=timings.tokens / positions)
        read = experts_read / self._forward.num_experts if experts_read else 0.0
        step = Step(self._steps, size, timings.total / positions, read, launched.before is not None)
        part = StepPart(now - timings.total, timings.forward, timings.sample, step, positions)
        for task, _ in selected:
            task.steps.append(part)
        return Finished(step, choices, are_finite, next_step)


def _rows_of(
    tasks: Sequence[Task], counts: Sequence[int], make: Callable[[int], list[ChoiceContext]]
) -> ChoosingRows:
    """Returns the choosing rows of tasks. Arguments as for ChoosingRows."""
    special = {
        place: make(place)
        for place, (task, count) in enumerate(zip(tasks, counts, strict=True))
        if count and (task.samples or task.sequence.is_special)
    }
    return ChoosingRows(counts, special, make)


def _further(row: ChoiceContext, positions: int) -> ChoiceContext:
    """Returns the context ``positions`` later, with unknown tokens in between."""
    path = (*row.path, *[UNKNOWN] * positions)
    return replace(row, position=row.position + positions, path=path)


def size_of(items: Sequence[Item], block_size: int) -> StepSize:
    """Returns the size of a step. Committed tokens of an item count as prompt if they exceed a block."""
    prompts = sum([item.num_committed for item in items if item.num_committed > block_size])
    return StepSize(
        sequences=len(items),
        tokens=sum([len(item.tokens) for item in items]) - prompts,
        prompt_tokens=prompts,
        context_tokens=sum([len(item.sequence.tokens) for item in items]),
    )
