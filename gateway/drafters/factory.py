"""Drafters by name, for the sequences of one gateway."""

from gateway.drafters.beside_target import BesideTarget
from gateway.drafters.draft_worker import DraftWorker
from gateway.drafters.drafter import Drafter
from gateway.drafters.index import IndexDrafter
from gateway.sequence import Sequence
from gateway.workers.fleet import Fleet
from outrider.drafters.registry import Place, drafter


class Drafters:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def of(self, name: str, sequence: Sequence) -> Drafter:
        """Raises ValueError naming the drafters that there are."""
        info = drafter(name)
        if info.place is Place.DRAFT_WORKER:
            return DraftWorker(self._fleet, sequence)
        if info.place is Place.TARGET_WORKER:
            return BesideTarget(sequence)
        return IndexDrafter(info.load()(), sequence)
