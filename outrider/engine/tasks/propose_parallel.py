"""Drafting with a model that was trained to guess several tokens in one pass.

Source: An et al., "PARD: accelerating LLM inference with low-cost parallel draft model adaptation", 2025.
"""

from outrider.decoding.draft import ROOT, Draft, SparseProbs
from outrider.decoding.outcomes import RANKS, Branch, TopTokens
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.propose import Assignment, ProposeTask, extended
from outrider.engine.work import Result


class MaskedProposeTask(ProposeTask):
    """Feeds the committed tokens, then copies of the mask token.

    The logits after the last committed token belong to the first position, and the logits after each mask to
    the next position. The cached keys and values of masks are dropped.
    """

    def __init__(self, given: Assignment, mask_token: int) -> None:
        """mask_token: id of the model's mask token."""
        super().__init__(given)
        self.mask_token = mask_token
        self.guesses = self.depth  # number of guessed positions

    @property
    def is_known(self) -> bool:
        """Whether no pass is needed, or the pass is over."""
        return self.is_empty or self.done

    def tree(self) -> Draft:
        return self.sequence.pending if self.is_known else Draft.chain([self.mask_token] * (self.guesses - 1))

    def nodes(self) -> list[int]:
        return [] if self.is_known else list(range(ROOT, self.guesses - 1))

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        if not self.is_empty:
            self.guess(choices)
            cache.roll_back(self.sequence, self.sequence.cached)
        self.done = True
        return [self.result()]

    def guess(self, choices: Choices) -> None:
        """Stores the guesses; ``choices`` has a row for each position."""
        raise NotImplementedError


class ParallelProposeTask(MaskedProposeTask):
    """Drafts the best token of each position under the keyed noise, up to an end of sequence.

    Guesses that were prepared ahead are the Draft without a pass, even if they are fewer than requested.
    """

    ranks = RANKS

    def __init__(self, given: Assignment, mask_token: int) -> None:
        super().__init__(given, mask_token)
        # Draft-ahead needs the token after the Draft, in case the whole Draft is accepted.
        self.guesses = self.depth + given.prepares
        self.top_tokens = top_tokens_after(given.sequence, ROOT, mask_token)

    @property
    def is_known(self) -> bool:
        return self.is_empty or bool(self.top_tokens)

    def restart(self) -> None:
        super().restart()
        self.top_tokens = []

    def guess(self, choices: Choices) -> None:
        self.top_tokens = choices.top_tokens

    def chain(self) -> list[int]:
        """Returns the known tokens of the chain."""
        return chain_of(self.top_tokens[: self.depth], self.sequence)

    def draft(self) -> Draft:
        chain = self.chain()
        return extended(
            Draft.chain(chain), alternatives_after(self.top_tokens[: len(chain)], self.alternatives)
        )


class ParallelSampledProposeTask(MaskedProposeTask):
    """Samples each token with noise of its own: for rejection sampling and block verification."""

    samples = True

    def __init__(self, given: Assignment, mask_token: int) -> None:
        super().__init__(given, mask_token)
        self._drawn: list[tuple[int, SparseProbs]] = []

    def guess(self, choices: Choices) -> None:
        self._drawn = [choices.sample_draft_token(self.work.round, row) for row in range(self.guesses)]

    def draft(self) -> Draft:
        return Draft.chain([token for token, _ in self._drawn], [probs for _, probs in self._drawn])


def top_tokens_after(sequence: EngineSequence, node: int, mask_token: int) -> list[TopTokens]:
    """Returns the known top tokens after a pending node, and after each mask below it."""
    top_tokens = []
    following: int | None = node
    while following in sequence.draft.top_tokens:
        top_tokens.append(sequence.draft.top_tokens[following])
        following = sequence.pending.child(following, mask_token)
    return top_tokens


def chain_of(top_tokens: list[TopTokens], sequence: EngineSequence) -> list[int]:
    """Returns the best token of each position, up to a token that ends the generation."""
    tokens: list[int] = []
    for best in top_tokens:
        if not best:  # the grammar allows no token
            break
        tokens.append(best[0])
        if best[0] in sequence.end_token_ids:
            break
    return tokens


def alternatives_after(top_tokens: list[TopTokens], alternatives: list[Branch]) -> list[tuple[int, int]]:
    """Returns the alternatives of a chain of top tokens: (index of the parent in the chain, token)."""
    return [
        (alternative.accepted - 1, top_tokens[alternative.accepted][alternative.rank])
        for alternative in alternatives
        if alternative.accepted < len(top_tokens) and alternative.rank < len(top_tokens[alternative.accepted])
    ]
