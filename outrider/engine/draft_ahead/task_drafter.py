"""Factories of the tasks of a draft worker's model: to draft, and to prepare Drafts ahead."""

from abc import ABC, abstractmethod

from outrider.decoding.outcomes import Branch
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.parallel_branches import ParallelPrepareTask
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.tasks.propose import Assignment, CoupledProposeTask, ProposeTask, SampledProposeTask
from outrider.engine.tasks.propose_parallel import ParallelProposeTask, ParallelSampledProposeTask


class TaskDrafter(ABC):
    """Factory of an engine's Propose tasks. A registry row with the place DRAFT_WORKER names its class."""

    def __init__(self, mask_token: int | None) -> None:  # noqa: B027  most drafters need no mask
        """mask_token: mask of a model that drafts several tokens in one pass; None: the model has no mask.

        Raises:
            UnsupportedModelError: the class needs a mask.
        """

    @abstractmethod
    def coupled(self, given: Assignment) -> ProposeTask:
        """Returns the task that makes a Draft for coupled verification."""

    @abstractmethod
    def sampled(self, given: Assignment) -> ProposeTask:
        """Returns the task that makes a Draft for rejection sampling."""

    def prepare(self, task: ProposeTask, branches: list[Branch], *, goes_on: bool) -> PrepareTask | None:
        """Returns the task that prepares Drafts after verdicts on the Draft of ``task``; None: no task.

        Args:
            task: a task that ``coupled`` of this class returned.
            branches: likely verdicts.
            goes_on: whether the device feeds the tokens that it chooses for this sequence, without the host.
        """
        return None


class TokenByToken(TaskDrafter):
    """Drafts with a model that predicts one token in each pass."""

    def coupled(self, given: Assignment) -> ProposeTask:
        return CoupledProposeTask(given)

    def sampled(self, given: Assignment) -> ProposeTask:
        return SampledProposeTask(given)

    def prepare(self, task: ProposeTask, branches: list[Branch], *, goes_on: bool) -> PrepareTask | None:
        assert isinstance(task, CoupledProposeTask)
        return PrepareTask(task, branches, goes_on=goes_on)


class InOnePass(TaskDrafter):
    """Drafts with a model that guesses all positions of a Draft in one pass."""

    def __init__(self, mask_token: int | None) -> None:
        if mask_token is None:
            raise UnsupportedModelError(
                "the checkpoint's config names no pard_token: it cannot draft in one pass"
            )
        self._mask_token = mask_token

    def coupled(self, given: Assignment) -> ProposeTask:
        return ParallelProposeTask(given, self._mask_token)

    def sampled(self, given: Assignment) -> ProposeTask:
        return ParallelSampledProposeTask(given, self._mask_token)

    def prepare(self, task: ProposeTask, branches: list[Branch], *, goes_on: bool) -> PrepareTask | None:
        assert isinstance(task, ParallelProposeTask)
        return ParallelPrepareTask(task, branches)
