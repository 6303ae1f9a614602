"""Steps that a device was given, and steps whose tokens are known."""

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
    """How far a step drafts before the host reads its tokens."""

    # Most positions of each sequence, each after the best token of the position before; none: 1 of each.
    positions: Sequence[int] = ()
    # Whether other work has come: the step ends with what a device has been given. None: no work can come.
    is_interrupted: Callable[[], bool] | None = None
    # Begins Drafts on the device before the host knows the step's tokens, and returns the rounds that follow
    # there. None: nothing follows.
    begin_drafts: "Callable[[Launched], RoundsAhead | None] | None" = None

    @property
    def shortest(self) -> int:
        """Positions of the sequence with the fewest."""
        return min(self.positions) if self.positions else 1

    @property
    def longest(self) -> int:
        """Positions of the sequence with the most."""
        return max(self.positions) if self.positions else 1

    def is_interrupted_before(self, newest: Mark) -> bool:
        """Whether other work has come before the device has done the newest position.

        No position is launched in advance, so whoever comes waits for one position at most.

        newest: end of the newest position that is launched.
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
    """A forward pass that a device was given."""

    batch: Batch | Passes
    output: ForwardOutput
    built: float  # seconds of the host's clock when it was packed
    started: Mark
    ended: Mark


class LogitRows:
    """Rows of a step's logits: some choose a token, the rows of a Score only rate tokens that are there."""

    def __init__(self, counts: Sequence[int], choosing: Sequence[int]) -> None:
        """
        Args:
            counts: rows of each item.
            choosing: rows of each item that choose: all, or none.
        """
        self._counts, self._choosing = counts, choosing
        self._all = counts == choosing

    def choosing(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the choosing rows of ``rows``, which is [num_rows, ...]."""
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
    """A step that a device was given."""

    tasks: Sequence[Task]
    counts: list[int]  # tokens that each task feeds
    forward: Pass
    choosing: Choosing | DraftedTokens
    started: float  # seconds of the host's clock when packing began
    before: Mark | None = None  # end of the step before, if this step was launched early
    logit_rows: LogitRows | None = None  # None: all rows choose a token
    reached: Sequence[int] = ()  # positions that the step drafts for each task; none: a position for each
    further: Sequence["Launched"] = ()  # positions after the first, unless ``choosing`` has them

    @property
    def positions(self) -> int:
        """Positions of the task with the most."""
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
        """Returns the timings of a finished step. An early one begins with the end of the step before."""
        passes = [self.forward, *[position.forward for position in self.further]]
        forward = sum([seconds_between(each.started, each.ended) for each in passes])
        if self.before is None:
            build, total = self.forward.built - self.started, now - self.started
        else:
            build = seconds_between(self.before, self.forward.started)  # the device waited for this step
            total = seconds_between(self.before, self.choosing.arrival)
        sample = total - build - forward  # choosing tokens has waited for the device
        num_tokens = self.forward.batch.num_tokens + sum(self.reached) - len(self.reached)
        path = self.forward.batch.path
        return StepTimings(build, forward, sample, total, len(self.tasks), num_tokens, path)


@dataclass(frozen=True)
class Finished:
    """A step whose tokens are known."""

    step: Step
    choices: list[Choices]  # choices of each item
    # For each item: whether the cache of each token that it fed is finite. None: all numbers of the step are.
    are_finite: list[list[bool]] | None
    next_step: Launched | None = None  # next step, if it was launched early
