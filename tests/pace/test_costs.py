"""What steps and rounds cost, learned from their timings."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.drafters.registry import drafter
from outrider.pace.costs import RoundTimes, TargetCosts
from outrider.pace.drafter_cost import DrafterCost, DrafterCosts, RoundCost
from outrider.pace.experts import ExpertsRead
from outrider.pace.step import Step, StepSize
from outrider.pace.step_cost import StepCost
from outrider.pace.tuning import TUNING


def seconds(sequences: float, tokens: float, prompt_tokens: float = 0.0, context: float = 0.0) -> float:
    """A machine that reads weights for 20 ms, and computes 0.4 ms a token from 32 on."""
    compute = max(0.0, tokens + prompt_tokens - 32) * 0.4e-3
    return 20e-3 + compute + 0.05e-3 * sequences + 1e-6 * context


def taught(noise: float = 0.0, steps: int = 400) -> StepCost:
    cost, drawn = StepCost(), random.Random(0)
    for number in range(1, steps + 1):
        sequences = drawn.choice([1, 2, 4, 8, 16, 32])
        tokens = sequences * drawn.randint(1, 6)
        taken = seconds(sequences, tokens) * drawn.uniform(1 - noise, 1 + noise)
        cost.observe(Step(number, StepSize(sequences, tokens), taken))
    return cost


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.3, 0.1)])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 5), (8, 40), (32, 32), (32, 160)])
def test_step_cost_is_learned_through_noise(noise, tolerance, sequences, tokens):
    assert taught(noise).seconds(sequences, tokens) == pytest.approx(
        seconds(sequences, tokens), rel=tolerance
    )


def test_step_cost_that_is_asked_after_each_step_learns_the_same() -> None:
    asked_once, asked_always = StepCost(), StepCost()
    for number in range(1, TUNING.fit_after + 2 * TUNING.fit_every):
        step = Step(number, StepSize(number % 4 + 1, number % 4 + 1), seconds(number % 4 + 1, number % 4 + 1))
        asked_once.observe(step)
        asked_always.observe(step)
        assert asked_always.is_known is (number >= TUNING.fit_after)
    assert asked_once.is_known
    assert asked_once.seconds(2, 2) == asked_always.seconds(2, 2)


def test_step_cost_reports_out_of_order_are_learned_once() -> None:
    """A busy gateway reads several replies of one sequence, and then those of the next."""
    cost = StepCost()
    steps = [Step(number, StepSize(2, 2), 2e-3) for number in range(1, 9)]
    assert all(map(cost.observe, steps))
    assert not any(map(cost.observe, steps))
    assert cost.observe(Step(9, StepSize(2, 2), 2e-3))


def test_step_cost_of_a_worker_that_was_started_anew_is_learned() -> None:
    cost = StepCost()
    assert cost.observe(Step(1000, StepSize(1, 1), 2e-3))
    assert cost.observe(Step(1, StepSize(1, 1), 2e-3))


def test_step_cost_of_a_machine_slow_at_few_rows_is_learned():
    """The first 16 tokens cost most, further tokens ever less."""

    def taken(tokens: float) -> float:
        return 10e-3 + 1e-3 * min(tokens, 16) + 0.5e-3 * min(tokens, 64) + 0.3e-3 * tokens

    cost, drawn = StepCost(), random.Random(0)
    for number in range(1, 800):
        sequences = drawn.choice([1, 2, 4, 8, 16, 32, 64])
        tokens = sequences * drawn.randint(1, 6)
        cost.observe(Step(number, StepSize(sequences, tokens), taken(tokens)))
    for tokens in (4, 16, 64, 384):
        assert cost.seconds(min(tokens, 64), tokens) == pytest.approx(taken(tokens), rel=0.05)


def test_step_cost_of_a_mixture_is_learned() -> None:
    """A token chooses 8 of 128 experts, so that the first tokens of a step read the most."""

    def taken(tokens: float) -> float:
        return 2e-3 + 20e-3 * (1 - (1 - 8 / 128) ** tokens) + 0.01e-3 * tokens

    cost, drawn = StepCost(), random.Random(0)
    for number in range(1, 800):
        sequences = drawn.choice([1, 2, 4, 8, 16, 32, 64])
        tokens = sequences * drawn.randint(1, 6)
        cost.observe(Step(number, StepSize(sequences, tokens), taken(tokens) * drawn.uniform(0.9, 1.1)))
    for sequences, tokens in ((1, 1), (1, 3), (1, 5), (4, 4), (4, 20), (32, 32), (32, 160)):
        assert cost.seconds(sequences, tokens) == pytest.approx(taken(tokens), rel=0.15)


def test_step_cost_of_plain_decoding_stays_known_while_rounds_wait_for_the_host() -> None:
    """Plain decoding launches its steps early, so that it never pays for the wait."""

    def taken(tokens: float, is_early: bool) -> float:
        return 3e-3 + 0.6e-3 * tokens + (0.0 if is_early else 1e-3)

    cost, drawn = StepCost(), random.Random(0)
    for number in range(1, 1000):
        is_plain = number < 200
        tokens = 1 if is_plain else drawn.choice([4, 5, 6])
        is_early = is_plain and number % 20 > 0
        cost.observe(Step(number, StepSize(1, tokens), taken(tokens, is_early), is_early=is_early))
        if number > 250:
            assert cost.seconds(1, 1) == pytest.approx(taken(1, is_early=True), rel=0.04)
            assert cost.seconds(1, 5) == pytest.approx(taken(5, is_early=False), rel=0.04)


@pytest.mark.parametrize("read", [ExpertsRead.independent(8 / 128), ExpertsRead(0.01, 0.02, 0.035)], ids=str)
def test_step_cost_of_a_mixture_that_counts_its_experts_is_known_between_the_sizes_that_were_seen(read):
    """Plain decoding and rounds of one depth tell what rounds of another depth take."""

    def taken(sequences: int, tokens: int) -> float:
        return 2e-3 + 20e-3 * float(read.share(sequences, tokens)) + 0.01e-3 * tokens

    counting, guessing, drawn = StepCost(), StepCost(), random.Random(0)
    for number in range(1, 400):
        sequences, each = drawn.choice([1, 4, 32]), drawn.choice([1, 9])
        size, share = StepSize(sequences, sequences * each), float(read.share(sequences, sequences * each))
        step = Step(number, size, taken(sequences, sequences * each) * drawn.uniform(0.95, 1.05), share)
        counting.observe(step)
        guessing.observe(replace(step, experts_read=0.0))
    unseen = [(1, 3), (1, 5), (2, 2), (4, 12), (8, 8), (8, 40)]
    assert all(counting.seconds(*size) == pytest.approx(taken(*size), rel=0.06) for size in unseen)
    assert not all(guessing.seconds(*size) == pytest.approx(taken(*size), rel=0.06) for size in unseen)


def test_step_cost_never_falls_with_size():
    costs = taught(noise=0.3).seconds(16.0, np.arange(16.0, 200.0))
    assert (np.diff(costs) >= 0).all()


def test_step_cost_of_an_unknown_kind_of_pass_is_believed_at_once():
    """Else its time would be cut down to a few times nothing, again and again."""
    cost = StepCost()
    for number in range(1, 40):
        prompt = 2 ** (number % 10)
        cost.observe(Step(number, StepSize(1, 0, prompt), 1e-5 * prompt**1.5))
    assert cost.measured(1, 0) is None
    cost.observe(Step(40, StepSize(1, 1), 7e-3))
    assert cost.measured(1, 0) == pytest.approx(7e-3, rel=0.05)


def test_measured_below_the_shortest_pass_is_unknown():
    cost, drawn = StepCost(), random.Random(0)
    for number in range(1, 200):
        sequences = drawn.choice([30, 60])
        cost.observe(Step(number, StepSize(sequences, sequences), 1e-5 * sequences**2))
    assert float(cost.seconds(1, 1)) > 0
    assert cost.measured(1, 0) is None
    assert cost.measured(60, 0) == pytest.approx(36e-3, rel=0.1)


def test_step_cost_counts_a_step_once():
    once, often = StepCost(), StepCost()
    for number in range(1, 40):
        step = Step(number, StepSize(8, 8), 0.02)
        once.observe(step)
        assert often.observe(step)
        assert not any(often.observe(step) for _ in range(7))
    assert once.seconds(8, 8) == often.seconds(8, 8)


def test_step_cost_follows_a_machine_that_gets_slower():
    cost = taught()
    drawn = random.Random(1)
    for number in range(1000, 1300):
        sequences = drawn.choice([8, 16])
        tokens = sequences * drawn.choice([1, 4])
        cost.observe(Step(number, StepSize(sequences, tokens), 3 * seconds(sequences, tokens)))
    assert cost.seconds(8, 8) == pytest.approx(3 * seconds(8, 8), rel=0.2)
    assert cost.seconds(16, 64) == pytest.approx(3 * seconds(16, 64), rel=0.2)


def test_step_cost_of_a_machine_slow_for_a_while_is_as_slow_at_sizes_not_seen_meanwhile():
    """Else plain decoding would seem faster than rounds whenever another program runs for a while."""
    cost = taught()
    numbers = iter(range(1000, 2000))
    for factor, steps in ((1.6, 60), (1.0, 60)):
        for number in itertools.islice(numbers, steps):
            cost.observe(Step(number, StepSize(16, 64), factor * seconds(16, 64)))
        assert cost.seconds(16, 64) == pytest.approx(factor * seconds(16, 64), rel=0.1)
        assert cost.seconds(8, 8) == pytest.approx(factor * seconds(8, 8), rel=0.1)


def test_step_cost_changes_little_after_an_outlier():
    cost = taught()
    before = float(cost.seconds(8, 8))
    cost.observe(Step(1000, StepSize(8, 8), 100.0))
    assert cost.seconds(8, 8) < 1.1 * before


def test_step_cost_of_sizes_not_seen_any_more_is_kept():
    cost = taught()
    for number in range(1000, 1500):
        cost.observe(Step(number, StepSize(4, 4), seconds(4, 4)))
    assert cost.seconds(32, 160) == pytest.approx(seconds(32, 160), rel=0.1)


def test_prompts_are_not_charged_to_decoding():
    cost = taught()
    for number in range(1000, 1400):
        prompt = 512 if number % 2 else 0
        cost.observe(Step(number, StepSize(8, 8, prompt), seconds(8, 8, prompt)))
    assert cost.seconds(8, 8) == pytest.approx(seconds(8, 8), rel=0.1)


def test_step_cost_of_one_size_alone_is_constant():
    cost = StepCost()
    for number in range(1, 100):
        cost.observe(Step(number, StepSize(1, 1), 2e-3))
    assert cost.seconds(32, 32) == pytest.approx(2e-3, rel=0.7)


def test_step_cost_is_known_after_enough_samples():
    cost = StepCost()
    for number in range(1, TUNING.fit_after + 4):
        assert cost.is_known is (number > TUNING.fit_after)
        cost.observe(Step(number, StepSize(1, 1), 0.02))


def test_round_cost_grows_with_sequences_in_rounds():
    cost, drawn = RoundCost(), random.Random(0)
    for _ in range(2000):
        sequences = drawn.choice([1, 4, 16])
        cost.observe(sequences, 3e-3 + 0.2e-3 * sequences)
    assert cost.seconds([1, 8, 64]) == pytest.approx([3.2e-3, 4.6e-3, 15.8e-3], rel=0.1)


def test_round_cost_of_rounds_that_the_target_begins_by_itself_is_next_to_nothing():
    """The first of them comes from the gateway."""
    cost = RoundCost()
    for number in range(200):
        cost.observe(1, 0.0 if number % 10 else 1.5e-3)
    assert cost.seconds(1) < 0.2e-3


def test_drafter_cost_of_alternatives_shares_the_passes_of_their_positions():
    """128 alternatives next to 32 chains of four: 64 tokens a pass in place of 32."""
    cost = DrafterCost(drafter("eagle3"))
    cost.step = taught()
    none, some = (cost.seconds(32.0, 4.0, count, 0.0) for count in (0.0, 128.0))
    assert some - none == pytest.approx(4 * 32 * 0.4e-3, rel=0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", [1.5 * 20, 4.5 * 20, 8.5 * 20]),  # a pass for each token, and half of one
        ("parallel", [1.5 * 20, 1.5 * 20, 1.5 * (20 + 0.4 * 32)]),  # eight positions of eight are 64 tokens
        ("ngram", [0.0, 0.0, 0.0]),
    ],
)
def test_drafter_cost_follows_the_row_of_the_registry(name, expected):
    """Milliseconds of eight sequences at depths of 1, 4 and 8."""
    cost = DrafterCost(drafter(name))
    cost.step = taught()
    found = cost.seconds(np.full(3, 8.0), np.array([1.0, 4.0, 8.0]), np.zeros(3), np.zeros(3))
    assert 1e3 * found == pytest.approx(expected, rel=0.06)


def test_drafter_cost_of_a_busy_worker_counts_rounds_for_which_nothing_was_prepared():
    """It prepares for few of its sequences. During plain decoding it prepares for none."""
    costs, model, size = TargetCosts(), drafter("model"), StepSize(1, 1)
    for number in range(1, 100):
        costs.observe_step(Step(number, size, 20e-3))
        costs.observe_drafting(model, "a", Step(number, size, 2e-3))
        costs.observe_round(model, "a", 1, RoundTimes(4, 0.0, 0.0, 20e-3, ahead_hit=True))
    hidden_s, not_prepared = drafting_s(costs), RoundTimes(4, 9e-3, 0.0, 20e-3)
    assert hidden_s < 0.5e-3
    for _ in range(200):
        costs.observe_round(model, "a", 1, not_prepared, is_first=True)
    assert drafting_s(costs) == pytest.approx(hidden_s, abs=0.1e-3)
    for _ in range(200):
        costs.observe_round(model, "a", 1, not_prepared)
    assert drafting_s(costs) == pytest.approx(9e-3, rel=0.1)


def drafting_s(costs: TargetCosts) -> float:
    """Seconds from a Verdict to the next Draft of four tokens, of one sequence."""
    batch = costs.batch([(drafter("model"), "a")], 0.0)
    return float(batch.drafting(np.array(1.0), np.array(4.0), 0.0, np.array(20e-3)))


def test_drafter_costs_of_a_new_worker_equal_those_of_another():
    costs = DrafterCosts(drafter("model"))
    steps = [Step(number, StepSize(1, 1), 2e-3) for number in range(1, 100)]
    for step in steps:
        costs.at("fast").step.observe(step)
    assert costs.at("slow").step.seconds(1, 1) == pytest.approx(2e-3, rel=0.05)
    for step in steps:
        costs.at("slow").step.observe(Step(step.number, step.size, 8e-3))
    assert costs.at("slow").step.seconds(1, 1) == pytest.approx(8e-3, rel=0.1)
    assert costs.at("fast").step.seconds(1, 1) == pytest.approx(2e-3, rel=0.05)


def test_drafter_costs_forget_the_worker_used_least_recently():
    costs = DrafterCosts(drafter("model"))
    costs.at("0").step = taught()
    for number in range(1, 2 * TUNING.most_workers):
        costs.at(str(number))
    first = costs.at(str(TUNING.most_workers))
    assert costs.at(str(TUNING.most_workers)) is first
    costs.at("0").step.observe(Step(1, StepSize(1, 1), 9.0))
    assert costs.at(str(TUNING.most_workers)) is first  # it was asked for not long ago
    assert costs.at("1") is not costs.at("2")
    assert len(costs._of_worker) == TUNING.most_workers
