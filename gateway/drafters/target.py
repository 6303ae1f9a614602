"""Target drafters: their Drafts come with the target's verdicts."""

from gateway.drafters.drafter import SequenceDrafter
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.sequence import GatewaySequence


class VerdictDrafter(SequenceDrafter):
    """Hands out the Draft of the newest Verdict; the turn before asked for it, so nothing waits."""

    def __init__(self, sequence: GatewaySequence) -> None:
        self._sequence = sequence

    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Returns the Draft; it is empty if the newest Verdict brought none."""
        draft, self._sequence.draft = self._sequence.draft, None
        if draft is None or depth == 0:
            return NO_PROPOSAL
        return Proposal(draft.up_to(depth), len(self._sequence), step=self._sequence.draft_step)
