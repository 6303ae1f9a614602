"""Steps that were launched on a device, and finished steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from msgspec import structs

from outrider.engine.choosing.drafted_tokens import DraftedTokens
from outrider.engine.choosing.sampler import Choices, Choosing, RowNumbers
from outrider.engine.device_time import Mark, is_over, seconds_between
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.batch_invariant import Passes
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.loop.rounds_ahead import RoundsAhead
from outrider.engine.step_timings import StepTimings
from outrider.engine.tasks.task import Task
from outrider.pace.step import Step


@dataclass(frozen=True)
class Reach:
    """Limits of how far a step drafts before the host reads its tokens."""

    # Most positions of each sequence; each feeds the best token of the position before. Empty: one each.
    positions: Sequence[int] = ()
    # Returns whether other work has arrived, so that no further position is launched. None: none can arrive.
    is_interrupted: Callable[[], bool] | None = None
    # Starts Drafts on the device before the host knows the step's tokens, and returns the rounds that can
    # follow on the device. None: no Drafts are started.
    begin_drafts: "Callable[[Launched], RoundsAhead | None] | None" = None

    @property
    def shortest(self) -> int:
        """Smallest number of positions of a sequence."""
        return min(self.positions) if self.positions else 1

    @property
    def longest(self) -> int:
        """Largest number of positions of a sequence."""
        return max(self.positions) if self.positions else 1

    def is_interrupted_before(self, newest: Mark) -> bool:
        """Waits for the newest position; returns whether other work has arrived meanwhile.

        No position is launched in advance, so that new work waits for one position at most.

        newest: mark at the end of the newest launched position.
        """
        if self.is_interrupted is None:
            return False
        while not is_over(newest):
            if self.is_interrupted():
                return True
        return self.is_interrupted()


ONE_POSITION = Reach()


@dataclass(frozen=True)
class Pass:
    """A forward pass that was launched on a device."""

    batch: Batch | Passes
    output: ForwardOutput
    built: float  # time on the host's clock at which packing ended, seconds
    started: Mark
    ended: Mark


class LogitRows:
    """Rows of a step's logits: some choose a token, and the rows of a Score only rate given tokens."""

    def __init__(self, counts: Sequence[int], choosing: Sequence[int]) -> None:
        """
        Args:
            counts: rows of each item.
            choosing: rows of each item that choose a token: all its rows, or 0.
        """
        self._counts, self._choosing = counts, choosing
        self._all = counts == choosing

    def choosing(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns those of ``rows``, [num_rows, ...], that choose a token."""
        if self._all:
            return rows
        parts = zip(rows.split_with_sizes([*self._counts]), self._choosing, strict=True)
        return torch.cat([rows[:0], *(part for part, count in parts if count)])

    def with_logits(self, choices: list[Choices], logits: torch.Tensor) -> list[Choices]:
        """Returns the choices; an item that chooses nothing gets its rows of the logits."""
        if self._all:
            return choices
        starts = accumulate(self._counts, initial=0)
        return [
            choice
            if chooses or not count
            else structs.replace(
                choice, numbers=RowNumbers(logits, choice.perturbed, True), rows=slice(first, first + count)
            )
            for choice, chooses, first, count in zip(
                choices, self._choosing, starts, self._counts, strict=False
            )
        ]


@dataclass(frozen=True)
class Launched:
    """A step that was launched on a device."""

    tasks: Sequence[Task]
    counts: list[int]  # tokens that each task feeds
    forward: Pass
    choosing: Choosing | DraftedTokens
    started: float  # time on the host's clock at which packing began, seconds
    before: Mark | None = None  # end of the previous step, if this step was launched early
    logit_rows: LogitRows | None = None  # None: all rows choose a token
    reached: Sequence[int] = ()  # positions that the step drafts for each task; empty: one each
    further: Sequence["Launched"] = ()  # further positions, unless ``choosing`` contains them

    @property
    def positions(self) -> int:
        """Largest number of positions of a task."""
        return max(self.reached, default=1)

    @property
    def arrival(self) -> Mark:
        """Moment when the host can read the tokens of all positions."""
        return (self.further or [self])[-1].choosing.arrival

    def with_own_states(self) -> "Launched":
        """Returns the step with a copy of its hidden states, which the next replay of a graph overwrites."""
        output = self.forward.output
        if output.hidden is None or self.forward.batch.path != "graph":
            return self
        return replace(self, forward=replace(self.forward, output=output.with_own_states()))

    def further_tokens(self) -> list[list[tuple[int, ...]]]:
        """Returns the top tokens of further positions of each task, before the first invalid position."""
        found = [list[tuple[int, ...]]() for _ in self.tasks]
        of_positions = [position.choosing.read() for position in self.further]
        for place, own in enumerate(found):
            for choices, are_finite in of_positions:
                if not (choices[place].are_valid[0] and are_finite[place]):
                    break
                own.append(choices[place].top_tokens[0])
        return found

    def timings(self, now: float) -> StepTimings:
        """Returns a finished step's timings. A step launched early begins when the previous step ends."""
        passes = [self.forward, *[position.forward for position in self.further]]
        forward = sum([seconds_between(each.started, each.ended) for each in passes])
        if self.before is None:
            build, total = self.forward.built - self.started, now - self.started
        else:
            build = seconds_between(self.before, self.forward.started)  # the device was idle
            total = seconds_between(self.before, self.choosing.arrival)
        sample = total - build - forward  # includes the wait for the device
        num_tokens = self.forward.batch.num_tokens + sum(self.reached) - len(self.reached)
        path = self.forward.batch.path
        return StepTimings(build, forward, sample, total, len(self.tasks), num_tokens, path)


@dataclass(frozen=True)
class Finished:
    """A finished step, whose tokens the host knows."""

    step: Step
    choices: list[Choices]  # choices of each item
    # For each item: whether the cached numbers of each fed token are finite. None: all of them are.
    are_finite: list[list[bool]] | None
    next_step: Launched | None = None  # next step, if it was launched early
