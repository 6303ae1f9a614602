"""Mix of a drafter and an index: each Draft comes from whichever promises more tokens."""

from dataclasses import replace

from gateway.drafters.drafter import SequenceDrafter
from gateway.proposal import Proposal
from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft
from outrider.drafters.index import ScoredIndex, as_drawn
from outrider.drafters.occurrences import Continuation
from outrider.learning.agreement import agreement
from outrider.learning.mean import Rate
from outrider.pace.acceptance import TaskAcceptance, expected_tokens_by_position

PRIOR_SAMPLES = 8.0  # tokens; weight of the prior that an index's own probabilities are right
INDEX_MEMORY = 200.0  # guesses of an index; an observation weighs 1/e after these


class Promises:
    """Predicts how many tokens of a Draft will be correct, from the earlier guesses of one task.

    A guess is correct if it equals what the target said. So the text judges every guess of the index, even if
    the target never verified it, and every Draft of the other drafter.
    """

    def __init__(self) -> None:
        self._other = TaskAcceptance()
        self._index = Rate(INDEX_MEMORY, PRIOR_SAMPLES, PRIOR_SAMPLES)  # ratio of correct to expected tokens

    def of_other(self, depth: int) -> float:
        """Returns the expected number of correct tokens in a Draft of the other drafter."""
        return expected_tokens_by_position(self._other.rates()[:depth]) - 1.0

    def of_index(self, guess: Continuation) -> float:
        """Returns the expected number of correct tokens in a guess of the index.

        The index's own probabilities are corrected by how often the index was wrong.
        """
        factor = min(self._index.value(1.0), 1.0)
        return sum(
            factor**length * probability for length, probability in enumerate(guess.probabilities, start=1)
        )

    def observe_other(self, draft: Draft, text: list[int]) -> None:
        """Learns from the text that followed a Draft of the other drafter."""
        found = agreement(draft.tokens[: draft.chain_length], text)
        if found.reached:
            self._other.observe(found.correct, found.reached)

    def observe_index(self, guess: Continuation, text: list[int]) -> None:
        """Learns from the text that followed a guess of the index."""
        found = agreement(guess.tokens, text)
        before = (1.0, *guess.probabilities)
        rates = [now / then for now, then in zip(guess.probabilities, before, strict=False)]
        self._index.observe(found.correct, sum(rates[: found.reached]))


class MixedDrafter(SequenceDrafter):
    """Asks the index or the other drafter, whichever promises more tokens.

    The decision comes before the other drafter is asked, so it does not depend on tokens that were sampled.
    Rejection sampling and block verification need this.
    """

    def __init__(
        self,
        names: tuple[str, str],
        other: SequenceDrafter,
        index: tuple[SequenceDrafter, ScoredIndex],
        promises: Promises,
        sequence: GatewaySequence,
    ) -> None:
        """
        Args:
            names: name of the other drafter, name of the index.
            index: drafter that adds the sequence's tokens to the index, and the index.
        """
        self._names = names
        self._other = other
        self._taking_in, self._index = index
        self._promises = promises
        self._sequence = sequence
        self._base = 0  # length of the sequence that the newest guesses continue
        self._guess, self._draft = Continuation(), Draft()

    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Returns a Draft; a Draft of the index has no alternatives."""
        await self._taking_in.propose(0)
        self._judge()
        if depth == 0:
            return await self._other.propose(0)
        guess = self._guess = self._index.guess(depth)
        if self._promises.of_index(guess) > self._promises.of_other(depth):
            draft = as_drawn(Draft.chain(guess.tokens), self._sequence.sampling.verification)
            return Proposal(draft, self._base, drafter=self._names[1])
        proposal = await self._other.propose(depth, alternatives)
        if proposal.base == self._base:
            self._draft = proposal.draft
        return replace(proposal, drafter=self._names[0])

    def _judge(self) -> None:
        """Learns from the newest guesses by the text so far, and drops them."""
        text = self._sequence.since(self._base)
        self._promises.observe_index(self._guess, text)
        self._promises.observe_other(self._draft, text)
        self._base = len(self._sequence)
        self._guess, self._draft = Continuation(), Draft()

    def close(self) -> None:
        """Closes both drafters."""
        self._other.close()
        self._taking_in.close()
