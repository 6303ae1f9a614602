"""Drafters by name."""

from outrider.engine.drafters.draft_model import SmallModelDrafter
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.drafters.ngram import LookupDrafter

DRAFTERS: dict[str, type[Drafter]] = {"model": SmallModelDrafter, "ngram": LookupDrafter}
