"""Tokens that a grammar forces are no guesses: the pace and the counters learn nothing from them."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.api.round_message import round_message
from gateway.drafters.target import VerdictDrafter, from_verdict
from gateway.events import Events, TokenDecoded, VerdictReceived
from gateway.loop.stats import Stats
from gateway.proposal import NO_PROPOSAL, Proposal
from gateway.routing.paces import PaceObserver, Paces
from gateway.routing.route import Route
from gateway.routing.router import CandidateDrafter, Router, TaskRule
from gateway.sequence import GatewaySequence, VerdictDraft
from gateway.settings import Speculation
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.drafters.registry import drafter
from outrider.pace.acceptance import TaskAcceptance
from outrider.pace.controller import Pace
from outrider.pace.costs import RoundTimes
from outrider.pace.settings import PaceSettings
from protos import rounds_pb2

CHAIN = Proposal(Draft.chain([1, 2, 3, 4]))


def verdict(proposal: Proposal, accepted: list[int], own: int = 9, **forced: Any) -> VerdictReceived:
    tokens = [
        *(proposal.draft.tokens[node] for node in accepted),
        *range(100, 100 + forced.get("forced", 0)),
        own,
    ]
    reply = rounds_pb2.TargetReply(accepted=accepted, tokens=tokens, **forced)
    return VerdictReceived(proposal, reply, "fixed", False, 0.0, 0.0)


# accepted nodes, forced ones of the Draft, forced beyond it -> drafted, reached, accepted, forced
CASES = {
    "no grammar": ([0, 1], [], 0, (4, 3, 2, 0)),
    "all right, two of them forced": ([0, 1, 2, 3], [1, 2], 0, (2, 2, 2, 2)),
    "a guess after forced ones is wrong": ([0, 1], [0, 1], 0, (2, 1, 0, 2)),
    "a forced one spelled otherwise": ([0], [1], 0, (3, 1, 1, 0)),
    "forced ones beyond the Draft": ([0, 1, 2, 3], [], 5, (4, 4, 4, 5)),
    "nothing but forced ones": ([0, 1, 2, 3], [0, 1, 2, 3], 2, (0, 0, 0, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict_forced_tokens_are_not_drafted_reached_or_accepted(case: str) -> None:
    accepted, nodes, beyond, expected = CASES[case]
    event, stats = verdict(CHAIN, accepted, forced_nodes=nodes, forced=beyond), Stats()
    stats.on(event)
    assert (stats.drafted, stats.reached, stats.accepted, stats.forced) == expected
    assert stats.tokens == len(event.reply.tokens)


def test_stats_count_drafts_that_a_host_chose_once_they_are_judged() -> None:
    stats, came = Stats(), VerdictDraft(CHAIN.draft, "eagle3", None, is_of_host=True)
    sequence = GatewaySequence((1, 2), Sampling(), 1)
    stats.on(verdict(from_verdict(came, sequence, 4), [0]))
    stats.on(verdict(CHAIN, [0]))
    assert (stats.rounds, stats.host_drafts) == (2, 1)


def test_stats_of_an_end_that_was_drafted_count_it_as_reached_and_accepted() -> None:
    """The Verdict ends with that token, and lists it as the target's own."""
    stats = Stats()
    right = verdict(CHAIN, [0], own=2, finish_reason="stop")
    stats.on(right)
    assert (right.drafted_end, right.correct) == (1, [0, 1])
    assert (stats.accepted, stats.reached, stats.accepted_lengths[2]) == (2, 2, 1)
    assert stats.tokens == len(right.reply.tokens) == 2
    wrong = verdict(CHAIN, [0], own=3, finish_reason="stop")
    stats.on(wrong)
    assert (wrong.drafted_end, wrong.correct) == (None, [0])
    assert (stats.accepted, stats.reached, stats.tokens) == (3, 4, 4)


def test_drafted_end_that_a_grammar_forced_is_no_guess() -> None:
    event = verdict(CHAIN, [0], own=2, finish_reason="stop", forced_nodes=[1])
    assert (event.drafted_end, event.accepted, event.reached) == (None, 1, 1)


def test_round_that_ends_with_a_drafted_end_is_told_with_that_node_accepted() -> None:
    """The page strikes out tokens that were reached and not accepted."""
    event = verdict(CHAIN, [0], own=2, finish_reason="stop")
    assert list(round_message(event).accepted) == [0, 1]


def test_forced_tokens_of_plain_decoding_are_counted() -> None:
    stats = Stats()
    stats.on(TokenDecoded(rounds_pb2.TargetReply(tokens=[1, 2, 3], forced=2), 0.0))
    stats.on(verdict(NO_PROPOSAL, [], forced=3))
    assert (stats.forced, stats.tokens, stats.target_passes, stats.rounds) == (5, 7, 2, 0)


class Ranks(TaskAcceptance):
    """Records the ranks that it observes."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[int] = []

    def observe_rank(self, rank: int) -> None:
        self.observed.append(rank)


class Observed(Pace):
    """Records the rounds that it observes."""

    def __init__(self) -> None:
        super().__init__(PaceSettings())
        self.rounds: list[tuple[int, int, int]] = []

    def observe_round(
        self, sequence: Any, accepted: int, reached: int, times: RoundTimes, further: int = 0
    ) -> None:
        self.rounds.append((accepted, reached, times.depth))


ALTERNATIVE = Proposal(Draft((1, 2, 3, 7), (-1, 0, 1, 0)))  # 7 is the alternative to 2
OF_PACE = {
    "no grammar": (CHAIN, [0, 1], [], (2, 3, 4)),
    "forced ones between guesses": (CHAIN, [0, 1, 2], [1, 2], (1, 2, 2)),
    "a leaf instead of a guess": (ALTERNATIVE, [0, 3], [], (1, 2, 3)),
    "a leaf after a forced one": (ALTERNATIVE, [0, 3], [0], (0, 1, 2)),
    "nothing but forced ones": (CHAIN, [0, 1, 2, 3], [0, 1, 2, 3], (0, 0, 0)),
}


@pytest.mark.parametrize("case", OF_PACE)
def test_pace_verdict_with_forced_tokens_learns_from_guesses_alone(case: str) -> None:
    proposal, accepted, nodes, expected = OF_PACE[case]
    pace, ranks = observed("model", verdict(proposal, accepted, forced_nodes=nodes, forced=3))
    assert (pace.rounds, ranks.observed) == ([expected], [])


@pytest.mark.parametrize(("name", "expected"), [("eagle3", [1]), ("model", [])])
def test_pace_verdict_with_a_rank_teaches_alternatives_of_its_drafter(name: str, expected: list[int]) -> None:
    """A Verdict's rank is about the heads that made its Draft, not about other drafters."""
    _, ranks = observed(name, verdict(CHAIN, [0], rank=1))
    assert ranks.observed == expected
    _, ranks = observed(name, verdict(CHAIN, [0, 1, 2, 3]))
    assert ranks.observed == []


def observed(name: str, event: VerdictReceived) -> tuple[Observed, Ranks]:
    """Returns the pace and the drafter's acceptance after a Verdict on a Draft of that drafter."""
    speculation = Speculation().resolved(name, PaceSettings())
    paced = Paces(PaceSettings()).sequence(drafter(name), speculation, None, "interactive")
    paced.acceptance.task = ranks = Ranks()
    sequence = GatewaySequence((1,), Sampling(), 1)
    candidate = CandidateDrafter(VerdictDrafter(sequence), paced)
    kind = TaskRule(None, "coupled")
    route = Route([candidate], Router(lambda info: True), kind, sequence, Events())
    observer = PaceObserver(route, sequence)
    observer.pace = pace = Observed()
    observer.on(replace(event, proposal=replace(event.proposal, asked=candidate.name)))
    return pace, ranks
