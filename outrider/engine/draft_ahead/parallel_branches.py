"""Draft-ahead with a model that guesses several tokens in one pass: all branches share one step."""

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.outcomes import Branch, TopTokens
from outrider.engine.draft_ahead.branches import PrepareTask, with_path
from outrider.engine.tasks.propose_parallel import (
    ParallelProposeTask,
    alternatives_after,
    chain_of,
    top_tokens_after,
)


class ParallelPrepareTask(PrepareTask):
    """Feeds the Draft, the last token of each likely Verdict, and mask tokens after each of these.

    If such a Verdict comes, its tokens are cached already, and the guesses at the masks are the next Draft.
    """

    def __init__(self, task: ParallelProposeTask, branches: list[Branch]) -> None:
        """branches: likely verdicts."""
        super().__init__(task, branches)
        self._top_tokens = task.top_tokens
        self._mask_token = task.mask_token

    def tree(self) -> Draft:
        pending = self.sequence.pending
        has_lost_cache = self.sequence.cached < len(self.sequence.tokens)
        if self._steps or has_lost_cache:
            return pending
        if self._grown is None or self._grown[0] is not pending:
            self._grown = pending, self._extended(pending)
        return self._grown[1]

    def draft(self) -> Draft:
        draft = self._draft
        for branch in self._branches:
            tokens = self._verdict(branch)
            path = self.sequence.pending.path_of(tokens)
            if not tokens or len(path) < len(tokens):
                continue
            top_tokens = top_tokens_after(self.sequence, path[-1], self._mask_token)[: self._room(branch)]
            chain = chain_of(top_tokens, self.sequence)
            draft, above = with_path(draft, tokens, ROOT)
            draft, following = with_path(draft, chain, above[-1])
            for parent, token in alternatives_after(top_tokens[: len(chain)], self._alternatives):
                draft, _ = with_path(draft, [token], following[parent + 1])
        return draft

    def _extended(self, draft: Draft) -> Draft:
        for branch in self._branches:
            tokens = self._verdict(branch)
            if tokens and tokens[-1] not in self.sequence.end_token_ids:
                # A guess more than the next Draft has positions, in case that Draft is accepted as a whole.
                masks = [self._mask_token] * self._room(branch)
                draft, _ = with_path(draft, [*tokens, *masks], ROOT)
        return draft

    def _verdict(self, branch: Branch) -> list[int]:
        """Returns the Verdict's tokens; empty if it is impossible, or its last token is unknown."""
        accepted = self._chain[: branch.accepted]
        has_ended = bool(accepted) and accepted[-1] in self.sequence.end_token_ids
        best = self._top_tokens[branch.accepted] if branch.accepted < len(self._top_tokens) else ()
        if has_ended or branch.rank >= len(best):
            return []
        return [*accepted, best[branch.rank]]

    def _guessed(self, accepted: int) -> TopTokens | None:
        return self._top_tokens[accepted] if accepted < len(self._top_tokens) else None

    def _known(self, node: int) -> int:
        return min(len(top_tokens_after(self.sequence, node, self._mask_token)), self._depth)

    def _saved(self, known: int) -> float:
        return sum(self._steps) if known else 0.0
