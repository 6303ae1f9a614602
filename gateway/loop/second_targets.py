"""Budget and patience for second targets: when a sequence is opened at another target too.

A target is late if a reply takes longer than nearly all of its replies, and longer than a second target
usually takes to answer. How long a stall will last is unknown: a fair guess is as long again as it has
lasted. Second targets may cost a share of the time that targets have worked. Each is charged the time of its
steps until its answer, although other sequences share these steps. A second target that is stopped before its
answer is charged the whole time. Long stalls may overdraw the budget.
"""

import asyncio
import math
from collections import defaultdict

from gateway.sequence import GatewaySequence
from gateway.workers.fleet import IMBALANCE, Fleet
from gateway.workers.streams import Link
from outrider.learning.mean import Mean
from outrider.learning.tail import Tail
from outrider.telemetry.reasons import MoveReason
from protos import rounds_pb2

# Chosen, not measured.
TIMELY = 0.99  # quantile of a target's reply times: p99
LATER = 1.5  # multiple of the p99 reply time; a slower reply is late
MIN_PATIENCE_S = 0.05  # seconds; a shorter stall is over before a second target has prefilled the text
REMEMBERED = 512  # newest replies of a target that the p99 is computed from
RENEWED_AFTER = 32  # replies after which the p99 is computed anew
START_S = 1.0  # seconds; budget of a new gateway
MAX_BUDGET_S = 30.0  # seconds; largest budget that a gateway may save up
DEBT_S = 10.0  # seconds by which long stalls may overdraw the budget
LONG = 5.0  # multiple of the patience; a longer wait is a long stall
USUAL_S = 0.1  # seconds; prior for the time of a second target's answer, and for its work
MEMORY = 8.0  # second targets; memory of the exponential moving averages
MIN_LEFT = 32  # tokens; a sequence that is nearly finished is not moved
HALF_FREE = 0.5  # least free share of a target's KV cache, for it to take sequences of a full target


class SecondTargets:
    """Policy of a gateway: when a sequence is opened at a second target."""

    def __init__(self, fleet: Fleet, share: float) -> None:
        """share: share of the targets' time that second targets may take; 0: only drained targets get any."""
        self._fleet = fleet
        self._share = share
        self._tails: defaultdict[str, Tail] = defaultdict(
            lambda: Tail(TIMELY, REMEMBERED, RENEWED_AFTER)
        )  # key: address
        self._saved_s = START_S if share else 0.0  # seconds; budget of second targets
        self._answer_s = Mean(USUAL_S, MEMORY)
        self._work_s = Mean(USUAL_S, MEMORY)
        self._under_way = 0  # second targets that are not charged yet

    def observe(self, link: Link, reply: rounds_pb2.TargetReply, waited_s: float) -> None:
        """Records the time that a reply of the first target took, and adds to the budget."""
        if not self._share:
            return
        self._tails[link.worker.address].observe(waited_s)
        step = reply.timings.last_step
        worked_s = step.ns / 1e9 / max(step.sequences, 1)
        self._saved_s = min(self._saved_s + self._share * worked_s, MAX_BUDGET_S)

    def patience_s(self, link: Link) -> float:
        """Returns the seconds after which a reply of the target is late; infinite if unknown."""
        if not self._share or (tail := self._tails[link.worker.address].value) is None:
            return math.inf
        return max(LATER * tail, MIN_PATIENCE_S, self._answer_s.value)

    def choose(
        self, sequence: GatewaySequence, first: Link, reason: MoveReason, waited_s: float = 0.0
    ) -> Link | None:
        """Returns the second target for a sequence; None if there is none, or it would cost too much.

        waited_s: seconds that the sequence has waited for its first target.
        """
        if reason is not MoveReason.LATE and self._under_way:
            return None  # one move at a time: two prefills would stall a target's other sequences
        found = self._fleet.second_targets(sequence, first)
        is_long = waited_s > LONG * self.patience_s(first) and self._saved_s > -DEBT_S
        may = reason is MoveReason.DRAINED or self._may_spend or is_long
        return found[0] if found and may else None

    def why_move(self, sequence: GatewaySequence, first: Link) -> MoveReason | None:
        """Returns why the sequence should move to another target; None: it should stay."""
        if first.is_leaving:
            return MoveReason.DRAINED
        if sequence.limit - len(sequence) < MIN_LEFT or not self._may_spend:
            return None
        found = self._fleet.second_targets(sequence, first)
        if not found:
            return None
        now = asyncio.get_running_loop().time()
        if first.num_sequences(now) > found[0].num_sequences(now) + 1 + IMBALANCE:
            return MoveReason.BUSIER
        if first.load is not None and first.load.waiting and _has_plenty(found[0]):
            return MoveReason.FULL
        return None

    def began(self) -> None:
        """Reserves the usual cost of a second target."""
        self._under_way += 1

    def ended(self, worked_s: float, answered_s: float | None) -> None:
        """Charges a second target, which has taken the sequence over or was stopped.

        answered_s: seconds from its opening to its answer; None: unknown.
        """
        self._under_way -= 1
        self._work_s.observe(worked_s)
        self._saved_s -= worked_s
        if answered_s is not None:
            self._answer_s.observe(answered_s)

    @property
    def _may_spend(self) -> bool:
        return self._saved_s > (self._under_way + 1) * self._work_s.value


def _has_plenty(link: Link) -> bool:
    load = link.load
    return load is None or (not load.waiting and load.free_blocks >= HALF_FREE * load.total_blocks)
