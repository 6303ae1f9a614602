"""Budget and patience for second targets: when a sequence is opened at another target too.

A target is late if a reply takes longer than nearly all of its replies, and than a second target usually
takes to answer. How long a stall will last is unknown: as long again as it has lasted is a fair guess. Second
targets may cost a share of the time that targets have worked. Each is charged its steps until it has
answered, though other sequences share them, or the whole time until it was stopped. Long stalls may spend
what is not saved yet.
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
TIMELY = 0.99  # share of a target's replies that are in time
LATER = 1.5  # times the tail of all replies, from which on a reply is late
LEAST_PATIENCE_S = 0.05  # seconds; a shorter stall is over before a second target has read the text
REMEMBERED = 512  # newest replies of a target, whose times count
RENEWED_AFTER = 32  # replies after which their tail is computed anew
START_S = 1.0  # seconds of second targets that a new gateway may spend
MOST_S = 30.0  # seconds that a gateway may save up
DEBT_S = 10.0  # seconds that long stalls may spend before they are saved
LONG = 5.0  # times its patience for which a sequence has waited in a long stall
USUAL_S = 0.1  # seconds in which a second target is expected to answer, and to work, before any was seen
MEMORY = 8.0  # second targets; the expectations follow the newest
LEAST_LEFT = 32  # tokens; a sequence that is nearly finished is not moved
HALF_FREE = 0.5  # share of a target's cache that is free, if it takes sequences of a full one


class SecondTargets:
    """Decides for all sequences of a gateway."""

    def __init__(self, fleet: Fleet, share: float) -> None:
        """share: part of the targets' time that second targets may take; 0: none, but for drained targets."""
        self._fleet = fleet
        self._share = share
        self._tails: defaultdict[str, Tail] = defaultdict(
            lambda: Tail(TIMELY, REMEMBERED, RENEWED_AFTER)
        )  # key: address
        self._saved_s = START_S if share else 0.0  # what second targets may spend
        self._answer_s = Mean(USUAL_S, MEMORY)
        self._work_s = Mean(USUAL_S, MEMORY)
        self._under_way = 0  # second targets that nobody was charged for yet

    def observe(self, link: Link, reply: rounds_pb2.TargetReply, waited_s: float) -> None:
        """Learns from a reply of a first target, which was waited for so long."""
        if not self._share:
            return
        self._tails[link.worker.address].observe(waited_s)
        step = reply.timings.last_step
        worked_s = step.ns / 1e9 / max(step.sequences, 1)
        self._saved_s = min(self._saved_s + self._share * worked_s, MOST_S)

    def patience_s(self, link: Link) -> float:
        """Returns the seconds after which a reply of that target is late; infinite if that is unknown."""
        if not self._share or (tail := self._tails[link.worker.address].value) is None:
            return math.inf
        return max(LATER * tail, LEAST_PATIENCE_S, self._answer_s.value)

    def choose(
        self, sequence: GatewaySequence, first: Link, reason: MoveReason, waited_s: float = 0.0
    ) -> Link | None:
        """Returns the second target for a sequence; None if there is none, or it would cost too much.

        waited_s: seconds that the sequence has waited for its first target.
        """
        if reason is not MoveReason.LATE and self._under_way:
            return None  # moves wait for each other: texts taken in together would stop a target's sequences
        found = self._fleet.second_targets(sequence, first)
        is_long = waited_s > LONG * self.patience_s(first) and self._saved_s > -DEBT_S
        may = reason is MoveReason.DRAINED or self._may_spend or is_long
        return found[0] if found and may else None

    def why_move(self, sequence: GatewaySequence, first: Link) -> MoveReason | None:
        """Returns why the sequence would be better off at another target; None: it would not."""
        if first.is_leaving:
            return MoveReason.DRAINED
        if sequence.limit - len(sequence) < LEAST_LEFT or not self._may_spend:
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
        """Reserves what a second target usually takes."""
        self._under_way += 1

    def ended(self, worked_s: float, answered_s: float | None) -> None:
        """Charges a second target, which has gone on or stopped.

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
