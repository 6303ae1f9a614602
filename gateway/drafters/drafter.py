"""What makes the Drafts of one sequence, seen from the gateway: one method."""

from abc import ABC, abstractmethod

from gateway.proposal import Proposal


class SequenceDrafter(ABC):
    """A wrong guess costs time, never correctness."""

    @abstractmethod
    async def propose(self, depth: int, leaves: int = 0) -> Proposal:
        """A Draft that follows the committed tokens. It is cancelled where it takes too long.

        Args:
            depth: tokens of its chain, at most; 0 only takes the committed tokens in.
            leaves: runners-up beside the chain, at most.

        Raises:
            WorkerLostError: there will be none; whoever asks again may have more luck.
        """

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Frees what is held for the sequence."""
