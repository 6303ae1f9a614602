"""A drafter that stands beside the target: n-grams, and a look at the states that it is given."""

from collections.abc import Sequence
from typing import Any

from outrider.decoding.draft import Draft
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.registry import DrafterInfo, Place
from outrider.engine.asked import Asked
from outrider.engine.drafters.index import IndexDrafter

ROW = DrafterInfo(
    "beside",
    "n-grams in the target worker, for tests",
    Place.TARGET_WORKER,
    "tests.fakes.beside:Beside",
    hidden_layers=(-1, 0),
)


class Beside(IndexDrafter):
    """Counts how often the target's head, over the last layer's state, says the newest token."""

    asked = agreed = 0

    def __init__(self, model: Any) -> None:
        super().__init__(NgramIndex)
        self._head = model.lm_head

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        for one in asked:
            assert one.hidden is not None
            assert one.hidden.shape[0] == len(ROW.hidden_layers)
            Beside.asked += 1
            Beside.agreed += int(self._head(one.hidden[:1]).argmax()) == one.text.tokens[-1]
        return super().propose(asked)
