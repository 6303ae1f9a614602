"""Which depths serve a batch fastest, on machines whose cost is written down."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from outrider.pace.optimizer import best_alternatives, best_depths, log_rate, mix_of, round_seconds

MAX_DEPTH = 8


@dataclass(frozen=True)
class Machine:
    """Seconds: reading the weights, per token beyond a knee, per draft step, per round."""

    read: float = 15e-3
    token: float = 0.3e-3
    knee: float = 64
    draft: float = 2e-3
    hops: float = 1e-3
    calibration: float = 1.0
    plain_factor: float = 1.0
    draft_in_step: bool = False

    def step(self, sequences, tokens):
        return self.read + self.token * np.maximum(tokens - self.knee, 0.0) + 0.0 * sequences

    def drafting(self, sequences, depth, alternatives, target_step):
        return self.hops + self.draft * depth + 0.0 * sequences


def reach(*rates):
    return np.array([np.cumprod(np.full(MAX_DEPTH, rate)) for rate in rates])


def depths(rates, machine=None, batch=None, scale=1.0):
    is_batch = np.zeros(len(rates), bool) if batch is None else np.array(batch)
    return best_depths(reach(*rates), is_batch, machine or Machine(), scale).tolist()


def test_best_depths_of_one_stream_follow_its_acceptance():
    (unlikely,), (likely,) = depths([0.4]), depths([0.9])
    assert 0 < unlikely < likely


def test_best_depths_of_guesses_never_correct_are_zero():
    assert depths([0.03]) == [0]
    assert depths([0.03] * 8) == [0] * 8


def test_best_depths_with_a_slow_draft_are_zero():
    assert depths([0.8], Machine(draft=30e-3)) == [0]


def test_best_depths_of_rounds_slower_than_their_costs_are_zero():
    assert depths([0.8])[0] > 0
    assert depths([0.8], Machine(calibration=4.0)) == [0]


def test_best_depths_are_shallower_if_only_deep_rounds_take_longer():
    costly_from = np.array([[1.0] * 2 + [3.0] * (MAX_DEPTH - 2)])
    assert depths([0.8])[0] > 2
    assert depths([0.8], Machine(calibration=costly_from)) == [2]


@pytest.mark.parametrize("plain", [0, 2])
def test_best_depths_of_a_target_drafter_count_the_deepest_draft(plain):
    """It never drafts for one half while the target verifies the other, and its Drafts miss no step."""
    machine = Machine(token=2e-3, knee=0, read=0.0, draft=8e-3, hops=0.0)
    in_step = replace(machine, draft_in_step=True)
    mix = mix_of(np.array([0] * plain + [2, 4]), reach(*[0.8] * (plain + 2)), machine)
    expected = 2e-3 * (plain + 2 + 2 + 4) + 4 * 8e-3
    round_s, step_s = round_seconds(mix, in_step)
    assert round_s == pytest.approx(expected)
    assert round_seconds(mix, machine)[0] != pytest.approx(expected)
    if plain:
        assert step_s == pytest.approx(expected)


def test_best_depths_of_a_full_batch_are_zero():
    assert depths([0.6] * 256) == [0] * 256


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    "machine", [Machine(), Machine(knee=8), Machine(token=2e-3), Machine(draft=8e-3)], ids=str
)
@pytest.mark.parametrize("streams", [1, 4, 16, 64])
def test_best_depths_are_as_fast_as_any_uniform_depth(rate, machine, streams):
    """Against every fixed depth for all, plain decoding included."""
    chosen = best_depths(reach(*[rate] * streams), np.zeros(streams, bool), machine)
    best = log_rate(mix_of(chosen, reach(*[rate] * streams), machine), machine)
    for depth in range(MAX_DEPTH + 1):
        fixed = mix_of(np.full(streams, depth), reach(*[rate] * streams), machine)
        # 65 counts of tokens are compared: the best lies at most a step away.
        assert best >= log_rate(fixed, machine) - 0.02


def test_easy_sequences_are_drafted_deeper():
    easy, hard = depths([0.95, 0.4], Machine(knee=4))
    assert easy > hard


def test_batch_requests_lose_their_drafts_first():
    """Under growing load no interactive sequence is without Drafts while a batch sequence has them."""
    fewer = []
    for streams in (2, 16, 32, 64, 128, 256):
        chosen = depths([0.6] * streams, batch=[index % 2 == 1 for index in range(streams)])
        interactive, batch = chosen[::2], chosen[1::2]
        assert min(interactive) > 0 or max(batch) == 0
        fewer.append((sum(interactive) / streams, sum(batch) / streams))
    assert any(interactive > 0 and batch < interactive for interactive, batch in fewer)
    assert fewer[-1] == (0, 0)


def test_best_depths_of_a_capped_sequence_keep_its_cap():
    capped = reach(0.95, 0.95)
    capped[0, 2:] = 0.0
    assert best_depths(capped, np.zeros(2, bool), Machine())[0] <= 2


def alternatives(rate, hit_rate, machine=None, streams=1, are_trees=False, are_fed=None):
    machine = machine or Machine()
    chances = reach(*[rate] * streams)
    chosen = best_depths(chances, np.zeros(streams, bool), machine)
    return best_alternatives(
        chosen,
        chances,
        np.full(streams, hit_rate),
        np.full(streams, are_trees),
        np.full(streams, are_trees if are_fed is None else are_fed),
        machine,
    ).tolist()


def test_best_alternatives_are_some_if_the_target_takes_them_for_nothing():
    assert alternatives(0.6, 0.5)[0] > 0
    assert alternatives(0.6, 0.0) == [0]


def test_best_alternatives_are_none_if_each_token_costs():
    assert alternatives(0.6, 0.5, Machine(knee=0, token=3e-3)) == [0]
    assert sum(alternatives(0.6, 0.5, streams=32)) < 32 * alternatives(0.6, 0.5)[0]


def test_best_alternatives_of_a_tree_are_more():
    (next_to_chains,), (in_trees,) = alternatives(0.6, 0.5), alternatives(0.6, 0.5, are_trees=True)
    assert in_trees > next_to_chains
    assert alternatives(0.6, 0.0, are_trees=True) == [0]


def test_best_alternatives_of_a_fed_tree_are_fewer():
    class Feeding(Machine):
        def drafting(self, sequences, depth, alternatives, target_step):
            alone = super().drafting(sequences, depth, alternatives, target_step)
            return alone + 1e-3 * np.asarray(alternatives)

    (fed,) = alternatives(0.6, 0.5, Feeding(), are_trees=True)
    assert 0 < fed < alternatives(0.6, 0.5, are_trees=True)[0]
    # A block of guesses has them all.
    free = alternatives(0.6, 0.5, Feeding(), are_trees=True, are_fed=False)
    assert free == alternatives(0.6, 0.5, are_trees=True)
    # A draft model knows its alternatives anyway.
    assert alternatives(0.6, 0.5, Feeding()) == alternatives(0.6, 0.5)


def test_best_depths_count_sequences_of_other_gateways_as_load():
    assert sum(depths([0.6] * 4, scale=64.0)) < sum(depths([0.6] * 4))
