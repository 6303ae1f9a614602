"""How often drafted tokens are correct, from few observations and from many."""

import random

import pytest

from outrider.pace.acceptance import SequenceAcceptance, TaskAcceptance
from outrider.pace.tuning import TUNING

RATES = [0.6, 0.8, 0.5]


def observe(acceptance, rates, rounds, seed=0):
    drawn = random.Random(seed)
    for _ in range(rounds):
        accepted = next((i for i, rate in enumerate(rates) if drawn.random() >= rate), len(rates))
        acceptance.observe(accepted, min(accepted + 1, len(rates)))


def test_rates_are_conditional_per_position():
    task = TaskAcceptance(memory=2000.0)
    observe(task, RATES, 4000)
    assert task.rates()[:3] == pytest.approx(RATES, abs=0.05)


def test_rates_of_positions_never_reached_equal_the_one_before():
    task = TaskAcceptance()
    observe(task, RATES, 100)
    assert set(task.rates()[3:]) == {task.rates()[2]}


def test_acceptance_before_enough_rounds_is_unknown():
    task = TaskAcceptance()
    assert task.rates()[0] == pytest.approx(TUNING.prior_rate)
    observe(task, RATES, 10)
    assert not task.is_known
    observe(task, RATES, 30)
    assert task.is_known


def test_rates_after_one_bad_round_change_little():
    task = TaskAcceptance()
    task.observe(0, 1)
    assert task.rates()[0] > 0.5


def test_rates_forget_older_rounds():
    task = TaskAcceptance(memory=50.0)
    observe(task, [0.1], 500)
    observe(task, [0.9], 100)
    assert task.rates()[0] > 0.7


def test_sequence_rates_differ_from_the_task_within_a_few_rounds():
    task = TaskAcceptance()
    observe(task, [0.9, 0.9], 200)
    sequence = SequenceAcceptance(task)
    assert sequence.rates()[0] == pytest.approx(task.rates()[0])
    observe(sequence, [0.1], 8)
    assert sequence.rates()[0] < 0.6
    assert SequenceAcceptance(task).rates()[0] > 0.8


def tokens_of_likeness(kinds, rounds=12):
    """Weight of a task after 60 sequences whose rates are these in turn."""
    task = TaskAcceptance()
    for number in range(60):
        observe(SequenceAcceptance(task), [kinds[number % len(kinds)]] * 4, rounds, seed=number)
    return task.credibility_tokens


def test_weight_of_likeness_in_sequences_of_one_rate_is_the_most():
    assert tokens_of_likeness([0.8]) == TUNING.most_credibility_tokens
    assert tokens_of_likeness([0.95]) == TUNING.most_credibility_tokens


def test_weight_of_likeness_in_sequences_that_differ_is_small():
    assert tokens_of_likeness([0.5, 0.95]) < 10.0


def test_weight_of_likeness_before_sequences_are_known_is_the_least():
    assert TaskAcceptance().credibility_tokens == pytest.approx(TUNING.least_credibility_tokens)


def test_sequence_rates_are_at_most_one():
    task = TaskAcceptance()
    observe(task, [0.5], 100)
    sequence = SequenceAcceptance(task)
    for _ in range(20):
        sequence.observe(4, 4)
    assert max(sequence.rates()) <= 1.0


def test_hit_rate_is_0_until_it_is_known():
    task = TaskAcceptance()
    assert task.hit_rate == 0.0
    for _ in range(5):
        task.observe_rank(1)
    assert task.hit_rate == 0.0
    for _ in range(15):
        task.observe_rank(1)
    assert task.hit_rate == pytest.approx(1.0)


def test_hit_rate_is_the_share_of_second_guesses_after_wrong_first_ones():
    task = TaskAcceptance(memory=2000.0)
    drawn = random.Random(0)
    for rank in drawn.choices([1, 2, 5, 6], [0.4, 0.3, 0.2, 0.1], k=4000):
        task.observe_rank(rank)
    assert task.hit_rate == pytest.approx(0.4, abs=0.05)


def test_hit_rate_ignores_correct_first_guesses():
    task, other = TaskAcceptance(), TaskAcceptance()
    for _ in range(100):
        task.observe_rank(0)
    assert task.hit_rate == 0.0
    for rank in [1, 2, 3] * 20:
        for _ in range(4):
            task.observe_rank(0)
        task.observe_rank(rank)
        other.observe_rank(rank)
    assert task.hit_rate == other.hit_rate > 0.0


def test_hit_rate_forgets_older_guesses():
    task = TaskAcceptance(memory=50.0)
    for rank in [1] * 300 + [2] * 300:
        task.observe_rank(rank)
    assert task.hit_rate < 0.01


def test_ranks_leave_the_rates_of_positions():
    task = TaskAcceptance()
    observe(task, RATES, 100)
    before = task.rates()
    for rank in range(7):
        task.observe_rank(rank)
    assert task.rates() == before
