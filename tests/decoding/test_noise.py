"""Keyed noise: identical in every batch, unrelated between keys, positions and tokens, exact in the tails."""

import math
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from outrider.decoding import noise
from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.noise import gumbel, gumbel_at, gumbel_bound, words_at
from outrider.decoding.philox import Purpose, noise_key, philox
from outrider.decoding.sampling import choose
from outrider.decoding.settings import Sampling

KEYS = [2**64 - 1, 5, 10**18]
POSITIONS = [7, 2**32 - 1, 0]


def words(keys: Sequence[int], positions: Sequence[int], vocab_size: int) -> Tensor:
    """int64 [num_rows, vocab_size]"""
    rows = torch.arange(len(keys)).repeat_interleave(vocab_size)
    token_ids = torch.arange(vocab_size).repeat(len(keys))
    return words_at(keys, positions, rows, token_ids).view(len(keys), vocab_size)


def test_words_are_those_of_philox_in_plain_integers() -> None:
    def half(key: int, position: int, token: int, purpose: Purpose) -> int:
        first, second, third, fourth = philox((token // 8, position, 0, purpose), key)
        bits = second | first << 32 | fourth << 64 | third << 96
        return bits >> 16 * (token % 8) & 0xFFFF

    assert words(KEYS, POSITIONS, 20).tolist() == [
        [
            half(key, position, token, Purpose.CHOICE_HIGH) << 16
            | half(key, position, token, Purpose.CHOICE_LOW)
            for token in range(20)
        ]
        for key, position in zip(KEYS, POSITIONS, strict=True)
    ]


def test_noise_words_of_known_keys_never_change() -> None:
    # Stored texts can be had again from their seeds only as long as these stay.
    assert words([1], [0], 4).tolist() == [[0x92B097B3, 0x780E1B8A, 0xB57B83E6, 0xF422EC3A]]


@pytest.mark.parametrize("vocab_size", [1, 8, 1003])
def test_noise_does_not_depend_on_the_batch(vocab_size: int) -> None:
    together = gumbel(KEYS, POSITIONS, vocab_size)
    for index, (key, position) in enumerate(zip(KEYS, POSITIONS, strict=True)):
        assert torch.equal(gumbel([key], [position], vocab_size)[0], together[index])


def test_noise_does_not_depend_on_the_vocabulary_nor_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gumbel(KEYS, POSITIONS, 5000)
    assert torch.equal(gumbel(KEYS, POSITIONS, 77), whole[:, :77])
    monkeypatch.setattr(noise, "_BLOCKS_AT_ONCE", 50)
    assert torch.equal(gumbel(KEYS, POSITIONS, 5000), whole)


def test_noise_of_single_tokens_is_that_of_all() -> None:
    rows, token_ids = torch.tensor([0, 2, 1, 1]), torch.tensor([4999, 0, 13, 12])
    whole = gumbel(KEYS, POSITIONS, 5000)
    assert torch.equal(gumbel_at(KEYS, POSITIONS, rows, token_ids), whole[rows, token_ids])


@pytest.mark.parametrize("vocab_size", [1003, 128_256])
def test_bound_is_never_below_the_noise(vocab_size: int) -> None:
    assert (gumbel_bound(KEYS, POSITIONS, vocab_size) >= gumbel(KEYS, POSITIONS, vocab_size)).all()


@pytest.mark.parametrize("word", [0, 1, 2**16, 2**31, 2**32 - 2**10, 2**32 - 1])
def test_extreme_words_give_finite_noise_below_the_bound(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = {(Purpose.CHOICE_HIGH,): word >> 16, (Purpose.CHOICE_HIGH, Purpose.CHOICE_LOW): word}
    monkeypatch.setattr(
        noise, "_bits", lambda keys, positions, purposes, *_: torch.tensor([[float(bits[purposes])]])
    )
    value = float(gumbel([0], [0], 1))
    assert math.isfinite(value)
    assert value <= float(gumbel_bound([0], [0], 1))
    if word < 2**31:
        assert value == pytest.approx(-math.log(-math.log1p(-(word + 0.5) / 2**32)), rel=3e-7)


def test_noise_is_within_2_ulp_of_the_exact_value() -> None:
    bits = words(KEYS, POSITIONS, 20_000)
    # The uniform number in float32 is the same everywhere; the logarithms after it are what may differ.
    unit = bits.float().add(0.5).mul(noise.CELL).double()
    exact = -torch.log(-torch.log1p(-unit))
    ulp = torch.tensor(2.0) ** (exact.abs().log2().floor() - 23)
    # An inner error counts relative to 1 in the result, hence no less than an ulp of 1/2 is allowed.
    assert ((gumbel(KEYS, POSITIONS, 20_000).double() - exact).abs() <= 2 * ulp.clamp(min=2.0**-24)).all()


def flips(one: Tensor, other: Tensor) -> Tensor:
    """How often each of the 32 bits differs, float64 [32]."""
    return torch.stack([((one ^ other) >> bit & 1).double().mean() for bit in range(32)])


@pytest.mark.parametrize("neighbour", ["position", "token", "key", "distant key bit"])
def test_neighbour_flips_every_bit_half_of_the_time(neighbour: str) -> None:
    num_rows, vocab_size = 200, 200
    keys, positions = [10**12 + 97 * row for row in range(num_rows)], list(range(num_rows))
    here = words(keys, positions, vocab_size)
    if neighbour == "position":
        there = words(keys, [position + 1 for position in positions], vocab_size)
    elif neighbour == "token":
        there = here.roll(1, dims=1)
    else:
        change = 1 if neighbour == "key" else 2**63
        there = words([key ^ change for key in keys], positions, vocab_size)
    # Six standard deviations of a fair coin over 40,000 words: false alarm 2e-9 for each of 32 bits.
    assert (flips(here, there) - 0.5).abs().max() < 6 * 0.5 / math.sqrt(here.numel())


def test_avalanche_test_sees_a_weak_generator() -> None:
    weak = torch.arange(40_000).view(200, 200) * 0x9E3779B9 & 0xFFFFFFFF
    assert (flips(weak, weak.roll(1, dims=1)) - 0.5).abs().max() > 0.1


def test_noise_of_one_seed_over_a_thousand_prompts_follows_the_distribution() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    keys = [noise_key(1234, 0, [prompt, 17]) for prompt in range(1000)]
    tokens = (probs.log() + gumbel(keys, [2] * 1000, 4)).argmax(dim=1)
    counts = torch.bincount(tokens, minlength=4)
    assert chisquare(counts.numpy(), (probs * 1000).numpy()).pvalue > 1e-4


LARGE = 128_256
TAIL = LARGE - 10
TAIL_LOGITS = torch.full((LARGE,), math.log(0.01 / TAIL)).index_fill_(0, torch.arange(10), math.log(0.099))


def tail_p_value(tokens: Tensor) -> float:
    """Returns the p-value of draws with 1 % of the mass outside ten tokens, in two halves."""
    cells = torch.where(tokens < 10, 0, 1 + (tokens - 10) * 2 // TAIL)
    return float(
        chisquare(torch.bincount(cells, minlength=3), torch.tensor([0.99, 0.005, 0.005]) * len(tokens)).pvalue
    )


@pytest.mark.slow
def test_tail_frequencies_at_a_large_vocabulary() -> None:
    drawn = []
    for start in range(0, 2400, 48):
        rows = [ChoiceContext(Sampling(), 3 * key, 5, (), ()) for key in range(start, start + 48)]
        drawn.append(choose(TAIL_LOGITS.expand(48, -1), rows))
    assert tail_p_value(torch.cat(drawn)) > 1e-4


@pytest.mark.slow
def test_tail_test_sees_too_few_random_bits() -> None:
    drawn = []
    for start in range(0, 2400, 48):
        keys = [3 * key for key in range(start, start + 48)]
        halves = noise._bits(keys, [5] * 48, (Purpose.CHOICE_HIGH,), LARGE, "cpu")
        # Of the equally likely tokens of the tail only the one with the least bits can win.
        least, where = halves[:, 10:].min(dim=1, keepdim=True)
        candidates = torch.cat([halves[:, :10], least], dim=1)
        coarse = -torch.log(-torch.log1p(-(candidates + 0.5) * 2.0**-16))
        best = (TAIL_LOGITS[:11] + coarse).argmax(dim=1)
        drawn.append(torch.where(best < 10, best, 10 + where[:, 0]))
    assert tail_p_value(torch.cat(drawn)) < 1e-4
