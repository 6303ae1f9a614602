"""Simulated model: its passes take as long as a cost table says, and its choices are given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.outcomes import RANKS
from outrider.decoding.verify import verify_coupled
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices, RowNumbers
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.loop.launched import ONE_POSITION, Finished, Launched, Reach
from outrider.engine.loop.runner import size_of
from outrider.engine.planning.promise import Promise
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.step_timings import StepTimings
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import StepPart, Task
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from outrider.pace.step import Step, StepSize

MAX_LENGTH = 1 << 20  # tokens of a sequence
NUM_BLOCKS = 1 << 16
VOCAB_SIZE = 1 << 16
RIGHT = 0  # token that the target always chooses
WRONG = tuple(range(1, RANKS + 1))  # tokens that a draft may guess instead
SETTINGS = EngineSettings(model="simulated", block_size=64, prefill_chunk=1 << 20, max_sequences=256)
NOTHING = RowNumbers(torch.empty(0), np.empty((0, 0), np.float32), are_all_valid=True)
ALL = slice(None)  # rows


Cost = Callable[[StepSize, bool], float]  # size, is_early -> seconds
RankOf = Callable[[int, int], int | None]  # noise key, position -> rank of the target's token


@dataclass(frozen=True)
class EarlyStep:
    """Placeholder of a step that was launched during the previous step."""

    tasks: Sequence[Task]


class StepClock:
    """Clock that runs ahead of an event loop's time while a step is simulated."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return self._now() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Advances the clock by the time of a step."""
        self._ahead_s += seconds

    def fall_back(self) -> float:
        """Resets the clock to the event loop's time, and returns the seconds by which it was ahead."""
        seconds, self._ahead_s = self._ahead_s, 0.0
        return seconds


class SimulatedRunner:
    """Runner for a real engine, with a cache that only does the block accounting."""

    load_timings = LoadTimings()
    slow_because: tuple[str, ...] = ()
    promise: Promise = Promise("same seed, same text: no model is computed", True)
    vocab_size = VOCAB_SIZE
    context_length = MAX_LENGTH
    end_token_ids = frozenset[int]()
    launches_early = True
    mask_token: int | None = None

    def __init__(
        self,
        settings: EngineSettings,
        cost: Cost,
        rank: Callable[[ChoiceContext], tuple[int, ...]],
        clock: StepClock,
        experts: ExpertsRead = NO_EXPERTS,
    ) -> None:
        """
        Args:
            rank: returns the model's best tokens at a position, the best first.
            experts: experts that steps report as read.
        """
        self.settings = settings
        self.cache = PagedCache({}, NUM_BLOCKS, settings.block_size, torch.float32, torch.device("cpu"))
        self.last_step: StepTimings | None = None
        self.selected: Selected = []  # tasks of the newest step
        self._cost = cost
        self._rank = rank
        self._clock = clock
        self._experts = experts
        self._steps = 0
        self._drafting: Sequence[Task] = ()  # tasks of the newest step, if it drafts further positions
        self._continuing: Sequence[EngineSequence] = ()  # sequences of the newest step that need no host

    def run(
        self,
        selected: Selected,
        launched: Launched | None = None,
        following: Sequence[DecodeTask] = (),
        reach: Reach = ONE_POSITION,
    ) -> Finished:
        """Advances the clock by one pass. Further positions of a Draft count as steps launched early."""
        self.selected = selected
        tasks = [task for task, _ in selected]
        # Sequences whose rounds the device begins without the host.
        sequences = [
            task.sequence
            for task in tasks
            if isinstance(task, DecodeTask) and not task.is_plain and task.lease.depth > 0
        ]
        continues = len(sequences) == len(tasks) and sequences == self._continuing
        self._continuing = sequences
        is_early = launched is not None or tasks == self._drafting or continues
        self._drafting = tasks if reach.longest > 1 else ()
        self.cache.take_changes()  # discards the changes: there are no keys and values
        size = size_of([item for _, item in selected], self.settings.block_size)
        started, seconds = self._clock(), self._cost(size, is_early)
        self._clock.advance(seconds)
        self._steps += 1
        read = float(self._experts.share(size.sequences, size.tokens + size.prompt_tokens))
        step = Step(self._steps, size, seconds, read, is_early)
        part, choices = StepPart(started, seconds, 0.0, step), list[Choices]()
        for task, item in selected:
            rows = task.rows() if item.num_logits else []
            top_tokens = [self._rank(row) for row in rows]
            draft, chosen = task.judged if rows else NO_DRAFT, [best[0] for best in top_tokens]
            path = verify_coupled(draft, chosen).accepted if draft else ()
            are_valid = [True] * len(rows)
            choices.append(Choices(NOTHING, ALL, chosen, are_valid, rows, top_tokens, path=path))
            task.steps.append(part)
        next_step = cast(Launched, EarlyStep(following)) if following else None
        return Finished(step, choices, None, next_step)

    def free_memory(self) -> int:
        """Returns 0: there is no device."""
        return 0

    def shut_down(self) -> None:
        """Does nothing: no process was started."""
