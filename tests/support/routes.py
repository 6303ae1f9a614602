"""Candidate drafters that never draft, and a pace that rates them, to test the choice of drafters."""

from dataclasses import dataclass, field

from gateway.drafters.target import VerdictDrafter
from gateway.routing.router import CandidateDrafter, TaskRule
from gateway.sequence import GatewaySequence
from outrider.decoding.settings import Sampling
from outrider.drafters.registry import DrafterInfo, Place
from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.sequence import PacedSequence
from outrider.pace.settings import PaceSettings

CODE, PROSE = TaskRule("code", "coupled"), TaskRule("prose", "coupled")


@dataclass
class Machine:
    """Pace that weights the correct tokens of each drafter by a given worth."""

    worth: dict[str, float] = field(default_factory=dict)  # key: drafter; 1 if missing
    is_known: bool = True
    settings: PaceSettings = field(default_factory=PaceSettings)
    __hash__ = object.__hash__

    def rate(self, info: DrafterInfo, rates: tuple[float, ...], max_depth: int) -> float:
        return self.worth.get(info.name, 1.0) * (1.0 + rates[0]) if self.is_known else 0.0


def candidate(name: str, place: Place = Place.DRAFT_WORKER) -> CandidateDrafter:
    sequence = GatewaySequence((1,), Sampling(), 0)
    paced = PacedSequence(DrafterInfo(name, "", place, ""), SequenceAcceptance(TaskAcceptance()), 4)
    return CandidateDrafter(VerdictDrafter(sequence), paced)
