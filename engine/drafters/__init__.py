"""Drafters by name."""

from engine.drafters.base import Drafter
from engine.drafters.lookup import LookupDrafter
from engine.drafters.small_model import SmallModelDrafter

DRAFTERS: dict[str, type[Drafter]] = {"model": SmallModelDrafter, "ngram": LookupDrafter}
