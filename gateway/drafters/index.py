"""Gateway drafters: indices over known text. They need no worker, so they are never late or lost."""

import asyncio

from gateway.drafters.drafter import AnswerKeeper
from gateway.proposal import Proposal
from gateway.sequence import GatewaySequence
from outrider.drafters.index import Index, as_drawn
from outrider.drafters.past_answers import PastAnswers

NOTED_AT_A_TIME = 512  # tokens; they take about a millisecond of the event loop


class GatewayDrafter(AnswerKeeper):
    """Drafts chains from an index, whatever number of alternatives is requested."""

    def __init__(self, index: Index, sequence: GatewaySequence, past: PastAnswers | None = None) -> None:
        super().__init__(sequence, past)
        self._index = index

    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Looks up a Draft. A long prompt enters the index in parts, so that other tasks run in between."""
        new = self._sequence.since(len(self._index))
        for begin in range(0, len(new), NOTED_AT_A_TIME):
            if begin:
                await asyncio.sleep(0)
            self._index.append(new[begin : begin + NOTED_AT_A_TIME])
        draft = as_drawn(self._index.propose(depth), self._sequence.sampling.verification)
        return Proposal(draft, len(self._index))
