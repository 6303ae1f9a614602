"""Target drafter that drafts by n-grams, and looks at the states that it is given."""

from collections.abc import Sequence

from outrider.decoding.draft import Draft
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.registry import DrafterInfo, Place
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.drafters.target_drafter import Target, TargetDrafter
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.settings import EngineSettings

ROW = DrafterInfo(
    "ngram_head",
    "n-grams in the target worker, for tests",
    Place.TARGET_WORKER,
    "tests.fakes.target_drafter:NgramHead",
)


class NgramHead(TargetDrafter):
    """Counts how often the target's head, over the last layer's state, says the newest token."""

    hidden_layers = (-1, 0)
    asked = agreed = 0

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._ngrams = IndexDrafter(NgramIndex)

    def load(self, target: Target) -> None:
        self._head = target.model.lm_head

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for request in requests:
            assert request.hidden is not None
            assert request.hidden.shape[0] == len(self.hidden_layers)
            NgramHead.asked += 1
            NgramHead.agreed += int(self._head(request.hidden[:1]).argmax()) == request.sequence.tokens[-1]
        return self._ngrams.propose(requests)

    def forget(self, sequence: DraftedSequence) -> None:
        self._ngrams.forget(sequence)
