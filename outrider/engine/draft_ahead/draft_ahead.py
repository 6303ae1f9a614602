"""Decides which verdicts on a Draft are prepared for in idle time, and learns from the outcome."""

from outrider.decoding.draft import MAX_NODES
from outrider.decoding.outcomes import Branch, Outcomes
from outrider.engine.draft_ahead.branches import PrepareTask
from outrider.engine.draft_ahead.task_drafter import TaskDrafter
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.propose import Assignment, ProposeTask
from outrider.engine.work import AheadOutcome, Propose
from outrider.pace.settings import MAX_DEPTH

# Most branches of a sequence: their nodes and the Draft share a step of MAX_NODES nodes. Each position of a
# chain may have an alternative.
MOST_BRANCHES = (MAX_NODES - 2 * MAX_DEPTH) // (2 * MAX_DEPTH + 1)


class DraftAhead:
    """Preparation of the next Drafts of each sequence, in idle time between two pieces of work."""

    def __init__(self, branches: int, drafter: TaskDrafter, *, goes_on: bool) -> None:
        """
        Args:
            branches: number of likely verdicts of all sequences together; 0: nothing is prepared.
            drafter: factory of the tasks.
            goes_on: whether the device feeds the tokens that it chooses, without the host.
        """
        self.unfinished: dict[int, PrepareTask] = {}  # tasks for idle time, by number of their sequence
        self._newest: dict[int, PrepareTask] = {}  # newest tasks, even if finished
        self._branches = branches
        self._drafter, self._goes_on = drafter, goes_on
        self._outcomes = Outcomes()

    @property
    def acceptance_rate(self) -> float:
        """Acceptance rate of all chains: the initial rate of a new sequence."""
        return self._outcomes.acceptance_rate

    def observe(self, sequence: EngineSequence, work: Propose) -> AheadOutcome | None:
        """Returns the outcome of draft-ahead for the Verdict that the work reports; None: no outcome."""
        sequence.draft.in_rounds = _follows_verdict(sequence, work)
        newest = self._newest.get(sequence.number)
        is_next = work.base == len(sequence.tokens)
        return newest.observe(work.tokens, self._outcomes) if newest and is_next else None

    def propose(
        self, sequence: EngineSequence, work: Propose, room: int, arrived: float, ahead: AheadOutcome | None
    ) -> ProposeTask:
        """Returns the task that makes the Draft.

        Args:
            room: number of tokens by which the sequence may still grow.
            arrived: time of the request by the engine's clock.
        """
        if sequence.sampling.verification != "coupled":
            return self._drafter.sampled(Assignment(sequence, work, room, arrived))
        alternatives = self.alternatives(sequence, work.depth, work.alternatives)
        prepares = self._branches > 0
        return self._drafter.coupled(Assignment(sequence, work, room, arrived, alternatives, ahead, prepares))

    def alternatives(self, sequence: EngineSequence, depth: int, count: int) -> list[Branch]:
        """Returns the likeliest alternatives of a chain of this depth."""
        return self._outcomes.alternatives(sequence.draft.acceptance_rate, depth, count)

    def prepare(self, task: ProposeTask) -> None:
        """Begins to prepare for the likely verdicts on the task's Draft, in idle time."""
        sequence, draft = task.sequence, task.draft()
        sequence.draft.drafted = draft
        if not self._branches or sequence.sampling.verification != "coupled" or not draft:
            return
        if not sequence.draft.in_rounds:
            return  # its Drafts only measure the drafter
        share = min(max(self._branches // (len(self.unfinished) + 1), 1), MOST_BRANCHES)
        branches = self._outcomes.likeliest(sequence.draft.acceptance_rate, draft.chain_length, share)
        goes_on = self._goes_on and sequence.needs_no_text
        unfinished = self._drafter.prepare(task, branches, goes_on=goes_on)
        if unfinished is not None:
            self._newest[sequence.number] = self.unfinished[sequence.number] = unfinished

    def forget(self, sequence: EngineSequence) -> None:
        """Drops the tasks of a sequence that has other work, or is closed."""
        self._newest.pop(sequence.number, None)
        self.unfinished.pop(sequence.number, None)


def _follows_verdict(sequence: EngineSequence, work: Propose) -> bool:
    """Returns whether the work's tokens are a Verdict on the last Draft; the first work counts as such."""
    if work.base + len(work.tokens) <= sequence.prompt_length + 1:
        return True
    is_next, drafted = work.base == len(sequence.tokens), sequence.draft.drafted
    stood = len(drafted.path_of(work.tokens))
    # Tokens that the grammar forces may follow a fully accepted chain.
    went_on = sequence.matcher is not None and 0 < drafted.chain_length <= stood
    return is_next and (stood >= len(work.tokens) - 1 or went_on)
