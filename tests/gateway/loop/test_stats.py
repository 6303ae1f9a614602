"""Every counter of speculation is counted from the events of a sequence."""

import pytest

from gateway.events import (
    DraftAwaited,
    Drafted,
    Event,
    FellBack,
    GuessJudged,
    RoundBegan,
    Routed,
    SecondEnded,
    SecondOpened,
    TargetLost,
    TokenDecoded,
    VerdictReceived,
)
from gateway.loop.stats import Stats
from gateway.proposal import AheadReport, Proposal
from outrider.decoding.draft import Draft
from outrider.telemetry.counters import COUNTERS, SpeculationCounter
from outrider.telemetry.reasons import DepthReason, MoveReason
from protos import rounds_pb2

PROPOSAL = Proposal(Draft.chain([5, 6, 7]), drafter="model", is_of_host=True, wanted=3)
VERDICT = rounds_pb2.TargetReply(accepted=[0], tokens=[5, 9])
EVENTS: list[Event] = [
    RoundBegan("fixed", continued=True),
    Drafted(Proposal(Draft(), ahead=AheadReport(tokens=2, rank=1, saved_s=0.1, wasted=3))),
    DraftAwaited(0.5),
    VerdictReceived(PROPOSAL, VERDICT, "fixed", continued=True, draft_s=0.5, target_s=0.2),
    TokenDecoded(rounds_pb2.TargetReply(tokens=[1], forced=1), 0.1),
    Routed("model", "named"),
    GuessJudged("ngram", 1, PROPOSAL),
    *(FellBack(reason, "") for reason in (DepthReason.LATE, DepthReason.LOST, DepthReason.EMPTY)),
    TargetLost("", is_first=True),
    SecondOpened(MoveReason.LATE),
    SecondEnded(MoveReason.LATE, 1.5, takes_over=True),
]


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda counter: counter.name)
def test_counter_of_the_table_counts_an_event(counter: SpeculationCounter) -> None:
    """A row that nothing counts would be published as 0 for ever."""
    stats = Stats()
    assert not getattr(stats, counter.name)
    for event in EVENTS:
        stats.on(event)
    assert getattr(stats, counter.name)


def test_stats_of_two_sequences_add_up() -> None:
    one, both = Stats(), Stats()
    for event in EVENTS:
        one.on(event)
    for _ in range(2):
        both.add(one)
    assert both.target_passes == 2 * one.target_passes
    assert both.drafted_by["model"]["accepted"] == 2
    assert both.accepted_lengths == [0, 2]
