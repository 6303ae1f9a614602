"""State of one sequence in the pace."""

import math
from dataclasses import dataclass

from outrider.drafters.registry import DrafterInfo
from outrider.pace.acceptance import SequenceAcceptance
from outrider.pace.exploration import Turns
from outrider.pace.settings import PaceSettings

THRESHOLDS, MEASURED, TRIAL = "thresholds", "measured", "trial"  # sources of a depth


@dataclass(frozen=True)
class Decision:
    """Parameters of one sequence's decoding until the next decision."""

    depth: int  # drafted tokens of a chain; 0: plain decoding
    decided_by: str  # MEASURED or THRESHOLDS
    alternatives: int = 0  # alternatives next to the chain
    patience_s: float = math.inf  # seconds to wait for a Draft; plain decoding is faster after that
    least_survival: float = 0.0  # probability of acceptance from which a node pays; 0: not known


class PacedSequence:
    """Sequence under a Pace: its depth, and what is known about its Drafts."""

    def __init__(
        self, drafter: DrafterInfo, acceptance: SequenceAcceptance, max_depth: int, is_batch: bool = False
    ) -> None:
        """max_depth: limit of the request. A new sequence counts as drafting."""
        self.drafter = drafter
        self.acceptance = acceptance
        self.max_depth = max_depth
        self.is_batch = is_batch
        self.worker = ""  # address of the worker that makes its Drafts; empty: no worker does
        self.length = 0  # tokens, prompt included
        self.decision = Decision(max_depth, THRESHOLDS)
        self.turns = Turns()
        self.follows_round = False  # whether its previous turn was a round
        self.late_s: float | None = None  # seconds waited for a late Draft, not counted yet; None: not late

    @property
    def depth(self) -> int:
        """Depth of the newest decision; 0: plain decoding."""
        return self.decision.depth

    @property
    def is_trying(self) -> bool:
        """Whether its next turn tries the other kind of decoding."""
        return self.turns.left > 0

    def cap(self, settings: PaceSettings) -> int:
        """Returns the largest depth, in tokens, that the request and the settings allow."""
        return min(self.max_depth, settings.max_depth)

    def try_round(self) -> None:
        """Makes its next turn a round, though plain decoding is faster: only a round can judge its Drafts."""
        if self.depth == 0:
            self.turns.probe()

    def apply(self, decision: Decision) -> None:
        """Applies a decision. It ends a trial of the kind of decoding that it chooses."""
        if (decision.depth > 0) is not (self.depth > 0):
            self.turns.left, self.late_s = 0, None
        self.decision = decision

    def is_like(self, other: "PacedSequence") -> bool:
        """Whether a new sequence may start with the depth of ``other``: equal task, drafter and priority."""
        task, other_task = self.acceptance.task, other.acceptance.task
        return task is other_task and (self.drafter, self.is_batch) == (other.drafter, other.is_batch)
