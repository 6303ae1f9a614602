"""Drafts of two drafters: each comes from the one that promises more tokens."""

from dataclasses import replace

from gateway.drafters.drafter import SequenceDrafter
from gateway.proposal import Proposal
from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft, agreed
from outrider.drafters.index import ScoredIndex, as_drawn
from outrider.drafters.occurrences import Guess
from outrider.pace.acceptance import TaskAcceptance, expected_tokens_by_position

PRIOR_SAMPLES = 8.0  # with which the probabilities of an index are believed before they are measured
KEPT = 1.0 - 1.0 / 200.0  # weight of what was seen before, with each guess


class Promises:
    """How many tokens of a Draft will stand, for one task: by what the text said after those before.

    Whatever the drafter, a guess was right where it is what the target said. So the index is judged by every
    guess, whether the target was asked about it or not, and the other drafter by all its Drafts.
    """

    def __init__(self) -> None:
        self._other = TaskAcceptance()
        self._right = self._expected = PRIOR_SAMPLES  # tokens of the index

    def of_other(self, depth: int) -> float:
        return expected_tokens_by_position(self._other.rates()[:depth]) - 1.0

    def of_index(self, guess: Guess) -> float:
        """Its score, with each token as much less likely as was measured."""
        factor = min(self._right / self._expected, 1.0)
        return sum(
            factor**length * probability for length, probability in enumerate(guess.probabilities, start=1)
        )

    def observe_other(self, draft: Draft, text: list[int]) -> None:
        """The text went on like this."""
        right, verified = _compared(draft.tokens[: draft.chain_length], text)
        if verified:
            self._other.observe(right, verified)

    def observe_index(self, guess: Guess, text: list[int]) -> None:
        right, verified = _compared(guess.tokens, text)
        before = (1.0, *guess.probabilities)
        rates = [now / then for now, then in zip(guess.probabilities, before, strict=False)]
        self._right = KEPT * self._right + right
        self._expected = KEPT * self._expected + sum(rates[:verified])


class MixedDrafter(SequenceDrafter):
    """Another drafter, which is not even asked where an index promises more.

    The decision comes before the other drafter is asked. So a Draft does not depend on what was drawn, which
    rejection sampling and block verification need.
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
            names: of the other drafter, of the index.
            index: what takes the sequence's tokens in, and what it holds.
        """
        self._names = names
        self._other = other
        self._taking_in, self._index = index
        self._promises = promises
        self._sequence = sequence
        self._base = 0  # tokens that the newest guesses follow
        self._guess, self._draft = Guess(), Draft()

    async def propose(self, depth: int, leaves: int = 0) -> Proposal:
        """The index's Draft has no leaves."""
        await self._taking_in.propose(0)
        self._judge()
        if depth == 0:
            return await self._other.propose(0)
        guess = self._guess = self._index.guess(depth)
        if self._promises.of_index(guess) > self._promises.of_other(depth):
            draft = as_drawn(Draft.chain(guess.tokens), self._sequence.sampling.verification)
            return Proposal(draft, self._base, drafter=self._names[1])
        proposal = await self._other.propose(depth, leaves)
        if proposal.base == self._base:
            self._draft = proposal.draft
        return replace(proposal, drafter=self._names[0])

    def _judge(self) -> None:
        """The newest guesses, as far as the text has come; then there are none."""
        text = self._sequence.since(self._base)
        self._promises.observe_index(self._guess, text)
        self._promises.observe_other(self._draft, text)
        self._base = len(self._sequence)
        self._guess, self._draft = Guess(), Draft()

    def close(self) -> None:
        """Both."""
        self._other.close()
        self._taking_in.close()


def _compared(guessed: tuple[int, ...], text: list[int]) -> tuple[int, int]:
    """How many leading tokens are right, and at how many positions that is known."""
    right = agreed(guessed, text)
    return right, right + (right < min(len(guessed), len(text)))
