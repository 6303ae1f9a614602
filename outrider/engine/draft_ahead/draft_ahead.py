"""Which verdicts on a Draft are prepared for while nobody waits, and what came of it."""

from outrider.decoding.draft import MAX_NODES
from outrider.decoding.outcomes import Outcomes
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.task_drafter import TaskDrafter
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.propose import Assignment, ProposeTask
from outrider.engine.work import AheadOutcome, Propose
from outrider.pace.settings import MAX_DEPTH

# Of one sequence. Its Draft travels with all of them; each chain may have a leaf at every position.
MOST_BRANCHES = (MAX_NODES - 2 * MAX_DEPTH) // (2 * MAX_DEPTH + 1)


class DraftAhead:
    """What a draft prepares, sequence by sequence: from one piece of work to the next."""

    def __init__(self, branches: int, drafter: TaskDrafter) -> None:
        """
        Args:
            branches: verdicts, of all sequences together, that are prepared for; 0: none.
            drafter: maker of the tasks.
        """
        self.unfinished: dict[int, PrepareTask] = {}  # tasks by number of their sequence, for idle time
        self._newest: dict[int, PrepareTask] = {}  # newest tasks, also if done or given up
        self._branches = branches
        self._drafter = drafter
        self._outcomes = Outcomes()

    @property
    def acceptance_rate(self) -> float:
        """Acceptance rate of all chains: a new sequence begins with it."""
        return self._outcomes.acceptance_rate

    def observe(self, sequence: EngineSequence, work: Propose) -> AheadOutcome | None:
        """Returns what the Verdict that the work reports shows about the Drafts prepared for it."""
        sequence.draft.in_rounds = _follows_verdict(sequence, work)
        newest = self._newest.get(sequence.number)
        is_next = work.base == len(sequence.tokens)
        return newest.observe(work.tokens, self._outcomes) if newest and is_next else None

    def propose(
        self, sequence: EngineSequence, work: Propose, room: int, arrived: float, ahead: AheadOutcome | None
    ) -> ProposeTask:
        """Returns the task that makes the Draft.

        Args:
            room: tokens that the sequence may still grow by.
            arrived: when it was asked for, by the engine's clock.
        """
        if sequence.sampling.verification != "coupled":
            return self._drafter.sampled(Assignment(sequence, work, room, arrived))
        alternatives = self._outcomes.alternatives(
            sequence.draft.acceptance_rate, work.depth, work.alternatives
        )
        prepares = self._branches > 0
        return self._drafter.coupled(Assignment(sequence, work, room, arrived, alternatives, ahead, prepares))

    def prepare(self, task: ProposeTask) -> None:
        """Begins with the Drafts for the likely verdicts on the task's, in time that nobody else needs."""
        sequence, draft = task.sequence, task.draft()
        sequence.draft.drafted = draft
        if not self._branches or sequence.sampling.verification != "coupled" or not draft:
            return
        if not sequence.draft.in_rounds:
            return  # its Drafts are only compared with the text
        share = min(max(self._branches // (len(self.unfinished) + 1), 1), MOST_BRANCHES)
        branches = self._outcomes.likeliest(sequence.draft.acceptance_rate, draft.chain_length, share)
        unfinished = self._drafter.prepare(task, branches)
        if unfinished is not None:
            self._newest[sequence.number] = self.unfinished[sequence.number] = unfinished

    def forget(self, sequence: EngineSequence) -> None:
        """Drops the tasks of a sequence that has other work, or is closed."""
        self._newest.pop(sequence.number, None)
        self.unfinished.pop(sequence.number, None)


def _follows_verdict(sequence: EngineSequence, work: Propose) -> bool:
    """Returns whether the work's tokens show that the sequence is in rounds; its first work counts as one."""
    if work.base + len(work.tokens) <= sequence.prompt_length + 1:
        return True
    is_next, drafted = work.base == len(sequence.tokens), sequence.draft.drafted
    stood = len(drafted.path_of(work.tokens))
    went_on = sequence.matcher is not None and 0 < drafted.chain_length <= stood  # forced tokens came
    return is_next and (stood >= len(work.tokens) - 1 or went_on)
