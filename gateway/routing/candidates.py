"""The drafters that may draft one sequence."""

from dataclasses import dataclass

from gateway.drafters.drafter import SequenceDrafter
from outrider.drafters.registry import DrafterInfo
from outrider.pace.sequence import PacedSequence

SMALL_LAG = 32  # tokens that a drafter may be behind and still be asked for Drafts


@dataclass(frozen=True)
class Candidate:
    """One of them."""

    drafter: SequenceDrafter
    paced: PacedSequence  # the sequence as the pace sees it with this drafter
    is_new: bool = False  # it is being rolled out: it drafts a share of the sequences alone

    @property
    def info(self) -> DrafterInfo:
        return self.paced.drafter

    @property
    def name(self) -> str:
        return self.info.name
