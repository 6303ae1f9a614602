"""Interface of a drafter for one sequence: one method."""

from abc import ABC, abstractmethod

from gateway.proposal import Proposal


class SequenceDrafter(ABC):
    """Makes the Drafts of one sequence. A wrong guess costs time, never correctness."""

    @abstractmethod
    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Returns a Draft that follows the committed tokens. It is cancelled if it takes too long.

        Args:
            depth: tokens of its chain, at most; 0 only takes the committed tokens in.
            alternatives: tokens next to the chain, at most.

        Raises:
            WorkerLostError: there will be none; asking again may succeed.
        """

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Frees what is held for the sequence."""
