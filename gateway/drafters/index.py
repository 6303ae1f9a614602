"""Gateway drafters: indices over text that is there. No worker and no hop, never late and never lost."""

import asyncio

from gateway.drafters.drafter import SequenceDrafter
from gateway.proposal import Proposal
from gateway.sequence import GatewaySequence
from outrider.drafters.index import Index, as_drawn
from outrider.drafters.past_answers import PastAnswers

NOTED_AT_A_TIME = 512  # tokens, about a millisecond of the event loop


class GatewayDrafter(SequenceDrafter):
    """Drafts chains from an index, whatever number of alternatives is asked for."""

    def __init__(self, index: Index, sequence: GatewaySequence, past: PastAnswers | None = None) -> None:
        """past: store that gets the answer in the end; None: nothing is kept."""
        self._index = index
        self._sequence = sequence
        self._past = past

    async def propose(self, depth: int, alternatives: int = 0) -> Proposal:
        """Looks up a Draft. A long prompt enters the index in parts, between which other tasks run."""
        new = self._sequence.since(len(self._index))
        for begin in range(0, len(new), NOTED_AT_A_TIME):
            if begin:
                await asyncio.sleep(0)
            self._index.append(new[begin : begin + NOTED_AT_A_TIME])
        draft = as_drawn(self._index.propose(depth), self._sequence.sampling.verification)
        return Proposal(draft, len(self._index))

    def close(self) -> None:
        """Hands the answer to the store of past answers."""
        past, self._past = self._past, None
        if past is not None:
            past.add(self._sequence.scope, self._sequence.generated)
