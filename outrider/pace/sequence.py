"""One sequence as the pace sees it."""

import math
from dataclasses import dataclass

from outrider.drafters.registry import DrafterInfo
from outrider.pace.acceptance import SequenceAcceptance
from outrider.pace.exploration import Turns
from outrider.pace.settings import PaceSettings

THRESHOLDS, MEASURED, TRIAL = "thresholds", "measured", "trial"  # what a depth comes from


@dataclass(frozen=True)
class Decision:
    """How one sequence decodes until the next decision."""

    depth: int  # drafted tokens of a chain; 0: plain decoding
    decided_by: str  # MEASURED or THRESHOLDS
    alternatives: int = 0  # alternatives next to the chain
    patience_s: float = math.inf  # seconds to wait for a Draft: beyond them plain decoding is faster
    least_survival: float = 0.0  # probability from which a node pays; 0: not known


class PacedSequence:
    """One sequence under a Pace: its depth, and what is known about its Drafts."""

    def __init__(
        self, drafter: DrafterInfo, acceptance: SequenceAcceptance, max_depth: int, is_batch: bool = False
    ) -> None:
        """max_depth: the request's own cap. A new sequence counts as drafting."""
        self.drafter = drafter
        self.acceptance = acceptance
        self.max_depth = max_depth
        self.is_batch = is_batch
        self.worker = ""  # address of the worker that makes its Drafts; empty: no worker does
        self.length = 0  # tokens, prompt included
        self.decision = Decision(max_depth, THRESHOLDS)
        self.turns = Turns()
        self.late_s: float | None = None  # seconds of a vain wait, to be counted; None: no Draft is late

    @property
    def depth(self) -> int:
        """Depth that was decided last; 0: plain decoding."""
        return self.decision.depth

    @property
    def is_trying(self) -> bool:
        """Whether its next turn is of the kind that is not in force."""
        return self.turns.left > 0

    def cap(self, settings: PaceSettings) -> int:
        """Tokens of the deepest Draft that its request and the settings allow."""
        return min(self.max_depth, settings.max_depth)

    def try_round(self) -> None:
        """Makes its next turn a round, though plain decoding is faster: only a round can judge its Drafts."""
        if self.depth == 0:
            self.turns.probe()

    def apply(self, decision: Decision) -> None:
        """Puts a decision in force. A trial of the kind of decoding that it chooses is over."""
        if (decision.depth > 0) is not (self.depth > 0):
            self.turns.left, self.late_s = 0, None
        self.decision = decision

    def is_like(self, other: "PacedSequence") -> bool:
        """Whether a new sequence may begin with the other's depth: task, drafter and priority are equal."""
        mine, theirs = self.acceptance.task, other.acceptance.task
        return mine is theirs and (self.drafter, self.is_batch) == (other.drafter, other.is_batch)
