"""Route of a sequence: what it hears from the events reaches the router."""

from dataclasses import replace

import pytest

from gateway.events import (
    Compared,
    Drafted,
    Event,
    Events,
    FellBack,
    GuessJudged,
    Overtaken,
    TokenDecoded,
    VerdictReceived,
)
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.route import Route
from gateway.routing.router import Router, TaskRule
from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.telemetry.reasons import DepthReason
from protos import rounds_pb2
from tests.support.routes import CODE, candidate

CHAIN = Proposal(Draft.chain([1, 2, 3]), asked="suffix", wanted=3)
SHORT = replace(CHAIN, wanted=4)
LONG = replace(CHAIN, wanted=2)  # an index guesses further than was asked for


class Learned(Router):
    """Records what it observes."""

    def __init__(self) -> None:
        super().__init__(lambda info: True)
        self.observed: list[tuple[str, int, int]] = []

    def observe(self, kind: TaskRule, name: str, correct: int, reached: int) -> None:
        self.observed.append((name, correct, reached))


def verdict(proposal: Proposal, accepted: list[int]) -> VerdictReceived:
    reply = rounds_pb2.TargetReply(accepted=accepted, tokens=[*accepted, 9])
    return VerdictReceived(proposal, reply, "fixed", False, 0.0, 0.0)


LEARNED: dict[str, tuple[Event, list[tuple[str, int, int]]]] = {
    "a refused token": (verdict(CHAIN, [0]), [("suffix", 1, 2)]),
    "a correct Draft": (verdict(CHAIN, [0, 1, 2]), [("suffix", 3, 3)]),
    "a correct Draft that is shorter than was asked for": (verdict(SHORT, [0, 1, 2]), [("suffix", 3, 4)]),
    "a refused token of a short Draft": (verdict(SHORT, [0]), [("suffix", 1, 2)]),
    "a correct Draft that is longer than was asked for": (verdict(LONG, [0, 1, 2]), [("suffix", 2, 2)]),
    "a refused token beyond what was asked for": (verdict(LONG, [0, 1]), [("suffix", 2, 2)]),
    "a refused token of a long Draft": (verdict(LONG, [0]), [("suffix", 1, 2)]),
    "a Verdict without a Draft": (verdict(NO_PROPOSAL, []), []),
    "a token of plain decoding": (TokenDecoded(rounds_pb2.TargetReply(tokens=[1]), 0.0), []),
    "a Draft": (Drafted(CHAIN), []),
    "an empty Draft": (Drafted(Proposal(Draft(), asked="suffix", wanted=3)), [("suffix", 0, 1)]),
    "a prompt taken in": (Drafted(Proposal(Draft(), asked="suffix")), []),
    "a late Draft": (FellBack(DepthReason.LATE, "no Draft after 1 s"), [("model", 0, 1)]),
    "a lost draft worker": (FellBack(DepthReason.LOST, "gone"), []),
    "tokens before the Draft came": (Overtaken(1, 2), [("model", 1, 2)]),
    "a guess during plain decoding": (Compared(2, 2), [("model", 2, 2)]),
    "a guess of another drafter": (GuessJudged("suffix", 1, CHAIN), [("suffix", 1, 2)]),
}


@pytest.mark.parametrize("heard", LEARNED)
def test_route_event_teaches_the_router_which_guesses_are_correct(heard: str) -> None:
    """The drafter ``model`` drafts; of tokens that were asked for and are missing the first is wrong."""
    event, expected = LEARNED[heard]
    candidates, events = [candidate(name) for name in ("model", "suffix")], Events()
    router = Learned()
    Route(candidates, router, CODE, GatewaySequence((1,), Sampling(), 1), events)
    events.emit(event)
    assert router.observed == expected
