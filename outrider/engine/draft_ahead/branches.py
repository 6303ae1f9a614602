"""Draft-ahead: while a Draft is verified, the next Drafts are made after its likely verdicts."""

from collections.abc import Sequence

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.outcomes import RANKS, SEQUENCE_MEMORY, Branch, Outcomes, rank_of
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.tasks.propose import CoupledProposeTask, alternatives_of, chain, extended, take_further
from outrider.engine.tasks.propose_parallel import ParallelProposeTask
from outrider.engine.tasks.task import Task
from outrider.engine.work import AheadOutcome, PreparedTree, Result
from outrider.learning.agreement import agreement
from outrider.learning.mean import Mean
from outrider.pace.settings import MAX_DEPTH


class PrepareTask(Task):
    """Makes Drafts after all likely verdicts together, with a step for each position of the next Drafts.

    A branch begins with the last token of a likely Verdict. If that Verdict accepts the whole Draft, an extra
    step first feeds the Draft's last token. No request waits for the result.

    The device may draft all positions without the host if the only branch is the whole Draft with the best
    token after it.
    """

    ranks = RANKS

    def __init__(
        self,
        task: CoupledProposeTask | ParallelProposeTask,
        branches: list[Branch],
        *,
        goes_on: bool = False,
    ) -> None:
        """
        Args:
            task: task that made the Draft; prepared Drafts are as deep and have as many alternatives.
            branches: likely verdicts.
            goes_on: whether the device may feed the tokens that it chooses, without the host.
        """
        super().__init__(task.sequence, task.sequence.clock())
        self._round = task.work.round
        self._draft = task.draft()  # a chain and alternatives
        self._chain = task.chain()
        self._depth = task.depth
        self._alternatives = task.alternatives
        self._branches = branches
        self._goes_on = goes_on and branches == [Branch(len(self._chain), 0)]
        self._own = len(task.sequence.pending)  # number of pending nodes that belong to the Draft
        self._steps: list[float] = []  # seconds of each step
        self._fed = 0  # number of fed tokens
        self._grown: tuple[Draft, Draft] | None = None  # pending tree, and this tree with the next nodes

    def tree(self) -> Draft:
        pending = self.sequence.pending
        if self._grown is None or self._grown[0] is not pending:
            self._grown = pending, extended(pending, self._next())
        return self._grown[1]

    def nodes(self) -> list[int]:
        return list(range(len(self.sequence.pending), len(self.tree())))

    @property
    def positions(self) -> int:  # type: ignore[override]
        """Positions of its only branch that are not known yet; 1 if the host feeds each position."""
        if not self._goes_on:
            return 1
        (guess,) = self._branches
        parent, count = self._parent(guess), self._room(guess) + 1
        known = 0 if parent is None else len(chain(self.sequence, count, parent))
        return min(max(count - known, 1), MAX_DEPTH)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to draft, or the cache that it began with was lost."""
        return not self.nodes()

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        pending = self.sequence.pending
        first = len(pending) - len(choices.top_tokens)
        self.sequence.draft.top_tokens |= {
            first + index: top_tokens for index, top_tokens in enumerate(choices.top_tokens)
        }
        further = take_further(self.sequence, choices.further)
        self._steps += [self.steps[-1].step.seconds] * (1 + further)
        self._fed += len(choices.top_tokens) + further
        self.done = self.is_complete
        return (
            [PreparedTree(self.sequence.number, self._round, self.draft(), self.timings())]
            if self.done
            else []
        )

    def draft(self) -> Draft:
        """Returns the Draft followed by the known nodes of the branches."""
        draft = self._draft
        for branch in self._branches:
            parent = self._parent(branch)
            if parent is None:
                continue
            tokens = chain(self.sequence, self._room(branch) + 1, parent, branch.rank)
            draft, path = with_path(draft, self._chain[: branch.accepted], ROOT)
            draft, path = with_path(draft, tokens, path[-1])
            first = self.sequence.pending.child(parent, tokens[0]) if tokens else None
            if first is not None:
                for above, token in alternatives_of(self.sequence, first, tokens[1:], self._alternatives):
                    draft, _ = with_path(draft, [token], path[above + 2])
        return draft

    def _parent(self, branch: Branch) -> int | None:
        """Returns the pending node, or ROOT, that the branch follows; None if it is not known yet."""
        path = [ROOT, *self.sequence.pending.path_of(self._chain[: branch.accepted])]
        is_known = len(path) > branch.accepted and path[-1] in self.sequence.draft.top_tokens
        return path[-1] if is_known else None

    def _next(self) -> list[tuple[int, int]]:
        """Returns the parent and the token of each node to feed next."""
        sequence = self.sequence
        if ROOT not in sequence.draft.top_tokens:
            return []
        nodes: dict[tuple[int, int], None] = {}
        for branch in self._branches:
            parent = self._parent(branch)
            if parent is None:  # the whole Draft must be fed first
                fed = sequence.pending.path_of(self._chain)
                if len(fed) == len(self._chain) - 1 and self._chain[-1] not in sequence.end_token_ids:
                    nodes[fed[-1] if fed else ROOT, self._chain[-1]] = None
                continue
            room = self._room(branch)
            tokens = chain(sequence, room + 1, parent, branch.rank)
            node: int | None = parent
            for token in tokens[:-1]:
                assert node is not None
                node = sequence.pending.child(node, token)
            if 0 < len(tokens) <= room and tokens[-1] not in sequence.end_token_ids and node is not None:
                nodes[node, tokens[-1]] = None
        return list(nodes)

    def _room(self, branch: Branch) -> int:
        """Returns how many tokens the next Draft may have after this Verdict."""
        length = len(self.sequence.tokens) + branch.accepted + 1
        return max(min(self._depth, self.sequence.limit - length - 1), 0)

    def observe(self, tokens: tuple[int, ...], outcomes: Outcomes) -> AheadOutcome | None:
        """Returns the outcome of the Verdict with these tokens; None if it does not judge this Draft."""
        sequence = self.sequence
        stood = len(self._draft.path_of(tokens))
        if stood != len(tokens) - 1:
            return None
        found = agreement(self._chain, tokens)
        accepted = found.correct
        guessed = self._guessed(accepted)
        rank = None if guessed is None else rank_of(tokens[accepted], guessed)
        refused = accepted < len(self._chain)
        outcomes.observe(accepted, found.reached, rank if refused else None)
        rate = Mean(sequence.draft.acceptance_rate, SEQUENCE_MEMORY)
        rate.observe(accepted / max(found.reached, 1), found.reached)
        sequence.draft.acceptance_rate = rate.value
        path = sequence.pending.path_of(tokens)
        if len(path) < len(tokens):
            return AheadOutcome(0, rank, 0.0, self._fed)
        known = self._known(path[-1])
        used = sum(node >= self._own for node in (*path, *sequence.pending.below(path[-1])))
        return AheadOutcome(known, rank, self._saved(known), self._fed - used)

    def _guessed(self, accepted: int) -> tuple[int, ...] | None:
        """Returns the best tokens after the accepted tokens; None if they are not known."""
        parent = self._parent(Branch(accepted, 0))
        return None if parent is None else self.sequence.draft.top_tokens[parent]

    def _known(self, node: int) -> int:
        """Returns the length of the next Draft's known chain after that pending node."""
        return len(chain(self.sequence, self._depth, node))

    def _saved(self, known: int) -> float:
        """Returns the seconds that drafting the known tokens took."""
        return sum(self._steps[:known])


def with_path(draft: Draft, tokens: Sequence[int], node: int) -> tuple[Draft, list[int]]:
    """Returns the Draft with a path of tokens after a node, and the path, beginning with the node."""
    path = [node]
    for token in tokens:
        child = draft.child(path[-1], token)
        if child is None:
            child, draft = len(draft), extended(draft, [(path[-1], token)])
        path.append(child)
    return draft, path
