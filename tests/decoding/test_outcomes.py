"""Which verdicts are likely: their order, what it follows, and what is learnt and forgotten."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.outcomes import PRIOR_RATE, RANKS, Branch, Outcomes

RATES = st.floats(0.0, 1.0)
DEPTHS = st.integers(0, 8)


@st.composite
def foresights(draw: st.DrawFn) -> Outcomes:
    """After some verdicts."""
    outcomes = Outcomes()
    for rank in draw(st.lists(st.integers(1, RANKS), max_size=30)):
        outcomes.observe(0, 1, rank)
    return outcomes


def all_ways(outcomes: Outcomes, rate: float, depth: int) -> list[Branch]:
    return outcomes.likeliest(rate, depth, RANKS * (depth + 1))


@given(foresights(), RATES, DEPTHS)
def test_outcomes_begin_with_the_likeliest(outcomes: Outcomes, rate: float, depth: int) -> None:
    hit_rates = outcomes.hit_rates()

    def probability(way: Branch) -> float:
        ending = rate if way.rank == 0 else (1.0 - rate) * hit_rates[way.rank - 1]
        return rate**way.accepted * ending

    probabilities = [probability(way) for way in all_ways(outcomes, rate, depth)]
    assert probabilities == pytest.approx(sorted(probabilities, reverse=True))


@given(foresights(), RATES, DEPTHS)
def test_likeliest_has_every_verdict_once(outcomes: Outcomes, rate: float, depth: int) -> None:
    """The draft's own continuation follows the whole chain alone: elsewhere it is the chain."""
    ways = all_ways(outcomes, rate, depth)
    refusals = {Branch(accepted, rank) for accepted in range(depth + 1) for rank in range(1, RANKS)}
    assert len(ways) == len(set(ways))
    assert set(ways) == {Branch(depth, 0), *refusals}


@given(foresights(), RATES, DEPTHS, st.integers(0, 60))
def test_count_takes_the_first_of_all(outcomes: Outcomes, rate: float, depth: int, count: int) -> None:
    assert outcomes.likeliest(rate, depth, count) == all_ways(outcomes, rate, depth)[:count]


@given(DEPTHS)
def test_likeliest_at_a_high_rate_begins_with_full_acceptance(depth: int) -> None:
    assert Outcomes().likeliest(0.95, depth, 1) == [Branch(depth, 0)]


@given(st.integers(1, 8))
def test_likeliest_at_a_low_rate_begins_with_refusals_of_the_first_token(depth: int) -> None:
    first = [Branch(0, rank) for rank in range(1, RANKS)]
    assert Outcomes().likeliest(0.05, depth, RANKS - 1) == first


@given(foresights(), RATES, DEPTHS, st.integers(0, 60))
def test_alternatives_are_the_likeliest_refusals(
    outcomes: Outcomes, rate: float, depth: int, count: int
) -> None:
    found = outcomes.alternatives(rate, depth, count)
    assert all(way.accepted < depth and way.rank >= 1 for way in found)
    assert len(found) == min(count, depth * (RANKS - 1))
    assert found == [way for way in all_ways(outcomes, rate, depth) if way in set(found)]


@given(foresights(), RATES)
def test_alternatives_of_a_draft_without_tokens_are_none(outcomes: Outcomes, rate: float) -> None:
    assert outcomes.alternatives(rate, 0, 5) == []


def test_hit_rates_follow_the_verdicts() -> None:
    shares = {1: 0.5, 3: 0.25, RANKS: 0.25}
    outcomes, rng = Outcomes(), random.Random(1)
    for rank in rng.choices(list(shares), list(shares.values()), k=2000):
        outcomes.observe(0, 1, rank)
    expected = [shares.get(rank, 0.0) for rank in range(1, RANKS)]
    assert outcomes.hit_rates() == pytest.approx(expected, abs=0.1)


def test_hit_rates_forget() -> None:
    outcomes = Outcomes()
    for rank in (1, 2):
        for _ in range(1000):
            outcomes.observe(0, 1, rank)
        newest = [float(rank == other) for other in range(1, RANKS)]
        assert outcomes.hit_rates() == pytest.approx(newest, abs=0.01)
    assert outcomes.likeliest(0.05, 4, 1) == [Branch(0, 2)]


def test_hit_rates_after_a_verdict_without_refusal_are_unchanged() -> None:
    outcomes = Outcomes()
    before = outcomes.hit_rates()
    outcomes.observe(4, 4, None)
    assert outcomes.hit_rates() == before


def test_hit_rates_after_a_token_beyond_the_alternatives_are_lower() -> None:
    outcomes = Outcomes()
    before = outcomes.hit_rates()
    outcomes.observe(0, 1, RANKS)
    assert all(now < then for now, then in zip(outcomes.hit_rates(), before, strict=True))


@given(st.lists(st.integers(0, RANKS), max_size=200))
def test_hit_rates_are_shares(ranks: list[int]) -> None:
    outcomes = Outcomes()
    for rank in ranks:
        outcomes.observe(0, 1, rank)
    assert all(rate >= 0.0 for rate in outcomes.hit_rates())
    assert sum(outcomes.hit_rates()) <= 1.0 + 1e-9


def test_acceptance_rate_follows_the_verdicts_and_forgets() -> None:
    outcomes = Outcomes()
    assert outcomes.acceptance_rate == PRIOR_RATE
    for accepted in (4, 1):
        for _ in range(300):
            outcomes.observe(accepted, 4, None)
        assert outcomes.acceptance_rate == pytest.approx(accepted / 4, abs=0.01)


def test_verdict_on_no_token_leaves_the_acceptance_rate() -> None:
    outcomes = Outcomes()
    outcomes.observe(0, 0, None)
    assert outcomes.acceptance_rate == PRIOR_RATE
