"""Drafters that stand beside the target: their Drafts come with its verdicts."""

from gateway.drafters.drafter import SequenceDrafter
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.sequence import GatewaySequence


class VerdictDrafter(SequenceDrafter):
    """What it proposes was asked for by the Verify before: nothing is waited for."""

    def __init__(self, sequence: GatewaySequence) -> None:
        self._sequence = sequence

    async def propose(self, depth: int, leaves: int = 0) -> Proposal:
        """Empty where the newest Verdict brought none."""
        draft, self._sequence.draft = self._sequence.draft, None
        if draft is None or depth == 0:
            return NO_PROPOSAL
        return Proposal(draft.up_to(depth), len(self._sequence), step=self._sequence.draft_step)
