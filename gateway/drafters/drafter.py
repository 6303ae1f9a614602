"""Interface of a drafter for one sequence."""

from abc import ABC, abstractmethod

from gateway.proposal import Proposal
from gateway.sequence import GatewaySequence
from outrider.drafters.past_answers import PastAnswers


class SequenceDrafter(ABC):
    """Makes the Drafts of one sequence. A wrong guess costs time, never correctness."""

    @abstractmethod
    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Returns a Draft that follows the committed tokens. The caller cancels it if it takes too long.

        Args:
            depth: most tokens of its chain; 0: the drafter only reads the committed tokens.
            alternatives: most tokens next to the chain.

        Raises:
            WorkerLostError: there will be no Draft; another request may succeed.
        """

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Frees what the drafter holds for the sequence."""


class AnswerKeeper(SequenceDrafter):
    """Base of drafters that may keep the answer, so that later Drafts can use it."""

    def __init__(self, sequence: GatewaySequence, past: PastAnswers | None = None) -> None:
        """past: store to which the answer is added at the end; None: the answer is not kept."""
        self._sequence = sequence
        self._past = past

    def close(self) -> None:
        """Adds the answer to the store of past answers, once."""
        past, self._past = self._past, None
        if past is not None:
            past.add(self._sequence.scope, self._sequence.generated)
