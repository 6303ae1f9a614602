"""Target drafters: their Drafts come with the target's verdicts."""

from gateway.drafters.drafter import AnswerKeeper
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.sequence import GatewaySequence, VerdictDraft
from outrider.drafters.registry import split_name


class VerdictDrafter(AnswerKeeper):
    """Returns the Draft of the newest Verdict. The turn before has requested it, so there is no wait."""

    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Returns the Draft; it is empty if the newest Verdict brought none."""
        came, self._sequence.draft = self._sequence.draft, None
        return NO_PROPOSAL if came is None or depth == 0 else from_verdict(came, self._sequence, depth)


def from_verdict(came: VerdictDraft, sequence: GatewaySequence, depth: int) -> Proposal:
    """Returns the Draft of a Verdict as its drafter's answer to a request for that depth."""
    draft, maker = came.draft, came.drafter
    if not split_name(maker)[1]:  # an index may guess deeper than requested
        draft = draft.up_to(depth)
    return Proposal(
        draft,
        len(sequence),
        step=came.step,
        drafter=maker,
        asked=maker,
        wanted=depth,
        is_of_host=came.is_of_host,
    )
