"""Several drafts in the simulated service: each task finds its own, and what that costs."""

from dataclasses import replace

import pytest

from bench import virtual
from bench.routing import TASKS, answered
from bench.simulate import Load
from gateway.settings import Speculation
from outrider.pace.settings import PaceSettings

LOAD = Load(streams=4, prompt_tokens=64, answer_tokens=128, warm_s=0.0, counted_s=8.0)


def test_a_draft_that_is_fitted_to_a_domain_wins_it_by_itself() -> None:
    """Nobody says which draft is good at what."""
    counter = virtual.run(answered({"code": Speculation()}, replace(LOAD, counted_s=16.0)))
    rounds = {name: counts["rounds"] for name, counts in counter.stats.by_drafter.items()}
    assert rounds["code"] > 0.6 * sum(rounds.values())  # those included before it was known
    assert counter.stats.routed["code", "measured"] > 0


def test_drafts_that_are_worse_get_less_than_a_tenth() -> None:
    """Few guesses may flatter one for a while; its own rounds then tell."""
    counter = virtual.run(answered({"chat": Speculation()}, LOAD))
    rounds = {name: counts["rounds"] for name, counts in counter.stats.by_drafter.items()}
    assert rounds["general"] > 0.9 * sum(rounds.values())


@pytest.mark.slow
def test_what_is_explored_is_bounded() -> None:
    counter = virtual.run(answered(dict.fromkeys(TASKS, Speculation()), replace(LOAD, counted_s=16.0)))
    asked = sum(tokens for (_, what), tokens in counter.stats.judged.items() if what == "verified")
    assert 0 < asked < 0.15 * counter.stats.verified
    assert PaceSettings().exploration == 0.1
