"""Makers of the tasks by which the model of a draft worker drafts and prepares ahead."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from outrider.decoding.outcomes import Branch
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.parallel_branches import ParallelPrepareTask
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.propose import CoupledProposeTask, ProposeTask, SampledProposeTask
from outrider.engine.tasks.propose_parallel import ParallelProposeTask, ParallelSampledProposeTask
from outrider.engine.work import AheadOutcome, Propose


@dataclass(frozen=True)
class Assignment:
    """One Draft to be made. Only Drafts for coupled verification have more than the first four fields."""

    sequence: EngineSequence
    work: Propose
    room: int  # tokens that the sequence may still grow by
    arrived: float  # time when the Draft was asked for, by the engine's clock
    alternatives: list[Branch] = field(default_factory=list)  # leaves beside the chain, as far as it reaches
    ahead: AheadOutcome | None = None  # what became of the Drafts that were prepared before
    prepares: bool = False  # whether ``prepare`` may be called with the task


class TaskDrafter(ABC):
    """Makes an engine's Propose tasks. The class that a row with the place DRAFT_WORKER names."""

    def __init__(self, mask_token: int | None) -> None:  # noqa: B027  most need no mask
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

    def prepare(self, task: ProposeTask, branches: list[Branch]) -> PrepareTask | None:
        """Returns the task that prepares Drafts for verdicts on the Draft of ``task``; None: it cannot.

        Args:
            task: a task that ``coupled`` of this class returned.
            branches: verdicts to be prepared for.
        """
        return None


class TokenByToken(TaskDrafter):
    """Drafts with a model of one token in each pass."""

    def coupled(self, given: Assignment) -> ProposeTask:
        return CoupledProposeTask(
            given.sequence,
            given.work,
            given.room,
            given.arrived,
            given.alternatives,
            given.ahead,
        )

    def sampled(self, given: Assignment) -> ProposeTask:
        return SampledProposeTask(given.sequence, given.work, given.room, given.arrived)

    def prepare(self, task: ProposeTask, branches: list[Branch]) -> PrepareTask | None:
        assert isinstance(task, CoupledProposeTask)
        return PrepareTask(task, branches)


class InOnePass(TaskDrafter):
    """Drafts with a model that guesses all positions of a Draft in one pass."""

    def __init__(self, mask_token: int | None) -> None:
        if mask_token is None:
            raise UnsupportedModelError(
                "the checkpoint's config names no pard_token: it cannot draft in one pass"
            )
        self._mask_token = mask_token

    def coupled(self, given: Assignment) -> ProposeTask:
        return ParallelProposeTask(
            given.sequence,
            given.work,
            given.room,
            given.arrived,
            self._mask_token,
            given.alternatives,
            given.ahead,
            prepares=given.prepares,
        )

    def sampled(self, given: Assignment) -> ProposeTask:
        return ParallelSampledProposeTask(
            given.sequence, given.work, given.room, given.arrived, self._mask_token
        )

    def prepare(self, task: ProposeTask, branches: list[Branch]) -> PrepareTask | None:
        assert isinstance(task, ParallelProposeTask)
        return ParallelPrepareTask(task, branches)
