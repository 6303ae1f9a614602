"""Drafting with a model: a chain token by token, and alternatives for its positions."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.outcomes import RANKS, Branch
from outrider.decoding.sampling import reads_text
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import AheadOutcome, Propose, Proposed, Result


@dataclass(frozen=True)
class Assignment:
    """Input of a Propose task. Only coupled verification uses more than the first four fields."""

    sequence: EngineSequence
    work: Propose
    room: int  # tokens by which the sequence may still grow
    arrived: float  # time when the Draft was requested, by the engine's clock
    alternatives: list[Branch] = field(default_factory=list)  # wanted if the chain reaches their position
    ahead: AheadOutcome | None = None  # outcome of the Drafts that were prepared before
    prepares: bool = False  # whether Drafts after its likely verdicts may be prepared ahead


class ProposeTask(Task):
    """Makes a Draft of ``depth`` tokens. The last token is not fed: its successor is not needed."""

    def __init__(self, given: Assignment) -> None:
        super().__init__(given.sequence, given.arrived)
        self.work = given.work
        self.depth = min(given.work.depth, given.room - 1)  # the target adds one token of its own
        self.alternatives = given.alternatives
        self._ahead = given.ahead

    @property
    def is_empty(self) -> bool:
        """Returns True if no token may be drafted."""
        return self.depth <= 0

    @abstractmethod
    def draft(self) -> Draft:
        """Returns the Draft as far as it is known."""

    def result(self) -> Proposed:
        return Proposed(self.sequence.number, self.work.round, self.draft(), self.timings(), self._ahead)


class CoupledProposeTask(ProposeTask):
    """Drafts the best tokens under the keyed noise, up to an end of sequence.

    The chain begins with known pending nodes, which may be the whole chain. The device may draft all further
    positions in one step. Penalties and grammars need the earlier tokens on the host, so a sequence with such
    settings is drafted position by position.
    """

    ranks = RANKS

    def __init__(self, given: Assignment) -> None:
        super().__init__(given)
        self._reads_text = reads_text(given.sequence.sampling) or given.sequence.matcher is not None
        self._forced: list[int] = []  # tokens that the grammar forces after the known chain
        self._progress: _Progress | None = None  # cached, since a step reads it many times

    def constrain(self) -> None:
        if self.sequence.matcher is None or self.is_empty or self._is_complete():
            return
        generated, known = self.sequence.tokens[self.sequence.prompt_length :], self.chain()
        forced = self.sequence.matcher.forced(generated, known)
        self._forced = forced[: self.depth - len(known) - 1]

    @property
    def positions(self) -> int:  # type: ignore[override]
        """Positions of the chain that are not known yet."""
        return 1 if self._reads_text else self.depth - len(self.chain())

    def tree(self) -> Draft:
        return self._found().tree

    def nodes(self) -> list[int]:
        return self._found().nodes

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        if not self.is_empty:
            pending, forced = self.sequence.pending, len(self._forced)
            for node in range(len(pending) - forced, len(pending)):
                self.sequence.draft.top_tokens[pending.parents[node]] = (pending.tokens[node],)
            self.sequence.draft.top_tokens[len(pending) - 1] = choices.top_tokens[0]
            take_further(self.sequence, choices.further)
            self._forced = []
        self.done = self._is_complete()
        return [self.result()] if self.done else []

    def chain(self) -> list[int]:
        """Returns the known tokens of the chain."""
        return self._found().chain

    def draft(self) -> Draft:
        draft = Draft.chain(self.chain())
        return extended(draft, alternatives_of(self.sequence, ROOT, draft.tokens, self.alternatives))

    def _is_complete(self) -> bool:
        return self._found().is_complete

    def _found(self) -> "_Progress":
        sequence, forced = self.sequence, self._forced
        pending, top_tokens = sequence.pending, sequence.draft.top_tokens
        found = self._progress
        if found is None or not found.is_of(pending, top_tokens, forced):
            tokens = chain(sequence, self.depth)
            has_ended = bool(tokens) and tokens[-1] in sequence.end_token_ids
            is_complete = len(tokens) >= self.depth or has_ended
            tree, nodes = pending, list[int]()
            if not is_complete:
                newest = [*tokens[-1:], *forced] if ROOT in top_tokens else forced
                tree = with_chain(pending, [ROOT, *pending.path_of(tokens)][-1], newest)
                nodes = [len(tree) - 1 if newest else ROOT]
            self._progress = found = _Progress(
                pending, top_tokens, len(top_tokens), forced, tokens, is_complete, tree, nodes
            )
        return found


@dataclass(frozen=True)
class _Progress:
    """Known chain and input of the next step; valid until one of the first four fields changes."""

    pending: Draft
    top_tokens: dict[int, tuple[int, ...]]  # only grows
    num_top_tokens: int
    forced: list[int]  # never changed in place
    chain: list[int]
    is_complete: bool
    tree: Draft
    nodes: list[int]

    def is_of(self, pending: Draft, top_tokens: dict[int, tuple[int, ...]], forced: list[int]) -> bool:
        is_same = pending is self.pending and top_tokens is self.top_tokens and forced is self.forced
        return is_same and len(top_tokens) == self.num_top_tokens


class SampledProposeTask(ProposeTask):
    """Samples a chain with noise of its own: for rejection sampling and block verification."""

    samples = True

    def __init__(self, given: Assignment) -> None:
        super().__init__(given)
        self.restart()

    def restart(self) -> None:
        super().restart()
        self._tree = NO_DRAFT

    def tree(self) -> Draft:
        return self._tree

    def nodes(self) -> list[int]:
        return [] if self.is_empty else [len(self._tree) - 1]

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        if not self.is_empty:
            token, probs = choices.sample_draft_token(self.work.round)
            self._tree = Draft.chain((*self._tree.tokens, token), (*self._tree.draft_probs, probs))
        self.done = len(self._tree) >= self.depth
        return [self.result()] if self.done else []

    def draft(self) -> Draft:
        return self._tree


def chain(sequence: EngineSequence, depth: int, node: int = ROOT, rank: int = 0) -> list[int]:
    """Returns the known best tokens after a pending node; the first token has the given rank.

    It returns at most ``depth`` tokens, up to a token that ends the generation. The list is empty if that
    rank is unknown.
    """
    tokens: list[int] = []
    following: int | None = node
    while following in sequence.draft.top_tokens and len(tokens) < depth:
        best = sequence.draft.top_tokens[following][0 if tokens else rank :]
        if not best:
            break
        tokens.append(best[0])
        if tokens[-1] in sequence.end_token_ids:
            break
        following = sequence.pending.child(following, tokens[-1])
    return tokens


def take_further(sequence: EngineSequence, further: Sequence[tuple[int, ...]]) -> int:
    """Stores the top tokens of positions after the newest node; returns the number of fed tokens.

    At each position the best token of the previous position was fed.
    """
    newest, top_tokens, fed = len(sequence.pending) - 1, sequence.draft.top_tokens, list[int]()
    for best in further:
        token = top_tokens[newest + len(fed)][0]
        if token in sequence.end_token_ids:
            break
        fed.append(token)
        top_tokens[newest + len(fed)] = best
    sequence.pending = with_chain(sequence.pending, newest, fed)
    return len(fed)


def top_tokens_of(sequence: EngineSequence, tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the known top tokens at each position of a Draft's chain, best first."""
    path = [ROOT, *sequence.pending.path_of(tokens)][: len(tokens)]
    return tuple(sequence.draft.top_tokens[node] for node in path if node in sequence.draft.top_tokens)


def alternatives_of(
    sequence: EngineSequence, node: int, tokens: Sequence[int], alternatives: list[Branch]
) -> list[tuple[int, int]]:
    """Returns the alternatives of a chain after a pending node: (index of the parent in the chain, token)."""
    path = [node]
    for token in tokens:
        child = sequence.pending.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return [
        (alternative.accepted - 1, sequence.draft.top_tokens[path[alternative.accepted]][alternative.rank])
        for alternative in alternatives
        if alternative.accepted < min(len(tokens), len(path))
        and alternative.rank < len(sequence.draft.top_tokens.get(path[alternative.accepted], ()))
    ]


def with_chain(draft: Draft, node: int, tokens: Sequence[int]) -> Draft:
    """Returns the Draft with a chain of further tokens after a node or ROOT."""
    parents = [node, *range(len(draft), len(draft) + len(tokens) - 1)]
    return extended(draft, list(zip(parents, tokens, strict=False)))


def extended(draft: Draft, nodes: list[tuple[int, int]]) -> Draft:
    """Returns the Draft with further nodes, each given by its parent and its token."""
    if not nodes:
        return draft
    parents, tokens = zip(*nodes, strict=True)
    return Draft((*draft.tokens, *tokens), (*draft.parents, *parents))
