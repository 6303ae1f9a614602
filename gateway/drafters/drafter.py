"""Interface of a drafter for one sequence."""

from abc import ABC, abstractmethod

from gateway.proposal import Proposal


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
