"""Search for the sequence that makes a step fail, by running parts of the step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.engine.blame import NotFiniteError, is_out_of_memory, says_broken
from outrider.engine.choosing.sampler import Choices
from outrider.engine.forward.batch import Item
from outrider.engine.loop.launched import ONE_POSITION, Finished, Launched, Reach
from outrider.engine.loop.runner import Runner
from outrider.engine.planning.memory import empty_cache
from outrider.engine.scheduling.scheduler import Selected
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.decode import DecodeTask
from outrider.engine.tasks.task import Task
from outrider.pace.step import Step

logger = logging.getLogger(__name__)


@dataclass
class Outcome:
    """Outcome of a step, or of its parts if it failed."""

    chosen: list[tuple[Task, Item, Choices]] = field(default_factory=list)
    blamed: list[tuple[EngineSequence, Exception]] = field(default_factory=list)  # cannot continue
    passes: list[tuple[Step, list[Task]]] = field(default_factory=list)  # forward passes with their tasks
    next_step: Launched | None = None  # next step, if it was launched early

    def with_own_memory(self) -> "Outcome":
        """Returns the outcome with copied outputs, which the next replay of a CUDA graph would overwrite."""
        chosen = [(task, item, choices.with_own_memory()) for task, item, choices in self.chosen]
        return replace(self, chosen=chosen)

    def add(self, other: "Outcome") -> None:
        """Adds the outcome of a part."""
        self.chosen += other.chosen
        self.blamed += other.blamed
        self.passes += other.passes


class BlameSearch:
    """Runs steps; if a step fails, runs smaller and smaller parts of it to find the sequence to blame."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(
        self,
        selected: Selected,
        launched: Launched | None = None,
        following: Sequence[DecodeTask] = (),
        reach: Reach = ONE_POSITION,
    ) -> Outcome:
        """Runs a step. Arguments as for Runner.run; parts of a failed step draft one position.

        Raises:
            Exception: the device or the process is broken; see engine.blame.
        """
        try:
            finished = self._runner.run(selected, launched, following, reach)
        except Exception as error:
            return self._in_parts(selected, error)
        return self._checked(selected, finished)

    def _in_parts(self, selected: Selected, error: Exception) -> Outcome:
        """Handles an error of a step: runs its parts, or blames its only sequence."""
        outcome, parts = Outcome(), _parts(selected)
        if is_out_of_memory(error) and parts:
            logger.warning("out of memory with %d sequences in a step: the step is split", len(selected))
            empty_cache(torch.device(self._runner.settings.device))
        elif says_broken(error):
            raise error
        elif len(selected) == 1:
            return Outcome(blamed=[(selected[0][1].sequence, error)])
        for part in parts:
            outcome.add(self.run(part).with_own_memory())
        return outcome

    def _checked(self, selected: Selected, finished: Finished) -> Outcome:
        """Runs sequences again if their numbers are not finite.

        Each first runs alone, as another sequence may have caused its numbers, and then without its Draft.
        """
        outcome = Outcome(passes=[(finished.step, [task for task, _ in selected])])
        if finished.are_finite is None:
            pairs = zip(selected, finished.choices, strict=True)
            outcome.chosen = [(task, item, choices) for (task, item), choices in pairs]
            outcome.next_step = finished.next_step
            return outcome
        doubtful: Selected = []
        of_items = zip(selected, finished.choices, finished.are_finite, strict=True)
        for (task, item), choices, are_finite in of_items:
            if all(are_finite[: item.num_committed]) and all(choices.are_valid[:1]):
                outcome.chosen.append((task, item, choices.limited(are_finite)))
            else:
                doubtful.append((task, item))
        if not doubtful:
            outcome.next_step = finished.next_step
            return outcome
        # The next step is dropped: it was fed tokens that the second try may not choose.
        outcome = outcome.with_own_memory()
        for task, item in doubtful:
            if len(selected) > 1:
                outcome.add(self.run([(task, item)]).with_own_memory())
            elif task.give_up_draft():
                outcome.add(self.run([(task, self._without_draft(task, item))]))
            else:
                outcome.blamed.append((item.sequence, NotFiniteError()))
        return outcome

    def _without_draft(self, task: Task, item: Item) -> Item:
        sequence, count = item.sequence, item.num_committed
        self._runner.cache.clear(sequence, sequence.cached + count)
        return Item(sequence, item.tokens[:count], count, len(task.nodes()), None)


def _parts(selected: Selected) -> list[Selected]:
    """Returns the two halves of the sequences, or the first half of a single sequence's committed tokens.

    Later steps feed the other half. Empty if there are no committed tokens to halve.
    """
    if len(selected) > 1:
        middle = len(selected) // 2
        return [selected[:middle], selected[middle:]]
    ((task, item),) = selected
    half = item.num_committed // 2
    if not half:
        return []
    return [[(task, Item(item.sequence, item.tokens[:half], half, task.rows_of_part(half), None))]]
