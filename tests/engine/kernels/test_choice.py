"""Tokens chosen by the kernels are those of outrider.decoding; without a GPU in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.sampling import process
from outrider.decoding.settings import Sampling
from outrider.engine.choosing import sampler
from outrider.engine.inputs.choice_input import ChoiceInput, DraftRows, PackedRows, bytes_to_choose
from outrider.engine.planning.skeleton import AliveBytes

choice = pytest.importorskip("outrider.engine.kernels.choice", reason="needs triton: pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INFINITY = float("inf")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_k": 10**12},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.03},
    {"temperature": 0.0, "verification": "block"},
]


def row(index: int = 0, **chosen: Any) -> ChoiceContext:
    return ChoiceContext(Sampling(**chosen), (2**64 - 1) // (index + 1), 7 * index, (), ())


ROWS = [row(index, **chosen) for index, chosen in enumerate(SETTINGS)]


def random(num_rows: int, vocab_size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def expected(logits: Tensor, rows: Sequence[ChoiceContext], ranks: int) -> list[list[int]]:
    return gumbel_max(process(logits, rows), rows, ranks)[0].tolist()


def chosen(
    logits: Tensor, rows: Sequence[ChoiceContext], ranks: int, allowed: Tensor | None = None
) -> list[list[int]]:
    mask = None if allowed is None else allowed.to(DEVICE)
    found = choice.choose_on_device(logits.to(DEVICE), packed(rows), ranks, mask)
    assert found.are_valid.all()
    return found.top_tokens.tolist()


def packed(rows: Sequence[ChoiceContext]) -> PackedRows:
    return ChoiceInput.of_rows(rows).copied(torch.device(DEVICE))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts rows into many chunks of many blocks, which a large vocabulary has."""
    monkeypatch.setattr(choice, "CHUNK", 256)
    monkeypatch.setattr(choice, "BLOCK", 8)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "ranks"),
    [(5, torch.float32, 4), (1000, torch.bfloat16, 1), (1237, torch.float16, 3)],
)
def test_every_setting_chooses_as_the_reference_does(
    small_chunks: None, vocab_size: int, dtype: torch.dtype, ranks: int
) -> None:
    logits = random(len(ROWS), vocab_size).to(dtype)
    assert chosen(logits, ROWS, ranks) == expected(logits, ROWS, ranks)


def test_choose_on_device_returns_perturbed_logits(small_chunks: None) -> None:
    """Perturbed logits agree as far as logarithms of two libraries do; for banned tokens they are -inf."""
    logits = random(len(ROWS), 300)
    found = choice.choose_on_device(logits.to(DEVICE), packed(ROWS), 4)
    tokens, values = gumbel_max(process(logits, ROWS), ROWS, 4)
    assert found.top_tokens.tolist() == tokens.tolist()
    assert values.isneginf().any()
    torch.testing.assert_close(found.perturbed.cpu(), values, rtol=1e-6, atol=1e-6)


def test_choose_on_device_in_parts_chooses_what_it_chooses_at_once(small_chunks: None) -> None:
    logits, draft = random(len(ROWS), 300).to(DEVICE), Draft.chain((5,) * (len(ROWS) - 1))
    tokens = choice.choose_on_device(logits, packed(ROWS), 2).top_tokens[:, 0].tolist()
    draft = Draft.chain((*tokens[:3], *draft.tokens[3:]))  # the first three guesses are correct
    given = ChoiceInput.of_rows(ROWS, DraftRows.of([draft], [len(ROWS)])).copied(torch.device(DEVICE))
    whole = choice.choose_on_device(logits, given, 2)
    cuts = [slice(0, 3), slice(3, len(ROWS))]
    parts = [choice.choose_on_device(logits[cut], given.without_drafts(cut), 2) for cut in cuts]
    found = choice.joined(parts, given)
    for name, expected_numbers in vars(whole).items():
        assert torch.equal(getattr(found, name), expected_numbers), name
    assert found.are_accepted.sum() >= 4


def test_bytes_to_choose_are_those_that_the_kernels_are_given() -> None:
    rows = [row(place) for place in range(20)]
    with AliveBytes() as alive:
        choice._planned(torch.empty(20, 128256, device="meta"), packed(rows), 1, None)
    planned = bytes_to_choose(20, 128256) + 20 * 128256 * 4
    assert planned == pytest.approx(alive.peak, rel=0.01)


def test_choose_on_device_reads_several_chunks() -> None:
    rows = [ROWS[0], ROWS[3], ROWS[7]]
    logits = random(3, 9001)
    assert chosen(logits, rows, 2) == expected(logits, rows, 2)


def test_rows_may_lie_apart(small_chunks: None) -> None:
    logits = random(4, 700)[::2, 3:611]
    rows = [ROWS[2], ROWS[5]]
    assert chosen(logits, rows, 1) == expected(logits, rows, 1)


@pytest.mark.parametrize("asked", [{"top_k": 500}, {"top_p": 0.99}, {"min_p": 1e-9}])
def test_choose_on_device_reads_rows_with_too_many_candidates_again(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    rows, logits = [row(3, temperature=1.5, **asked)], random(1, 2500, 0.5)
    monkeypatch.setattr(choice, "CAPACITY", 100)
    assert chosen(logits, rows, 1) == expected(logits, rows, 1)


@given(st.data())
@settings(max_examples=10)
def test_among_equals_the_lower_ids_are_kept(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(2, 40))
    values = data.draw(st.lists(st.sampled_from([-INFINITY, -1.0, -0.0, 0.0, 2.0]), min_size=vocab_size))
    logits = torch.tensor([[1.0, *values][:vocab_size]])
    asked = {
        "temperature": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        "top_k": data.draw(st.integers(0, vocab_size + 1)),
        "top_p": data.draw(st.sampled_from([0.3, 0.5, 0.75, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.1])),
    }
    rows = [row(data.draw(st.integers(0, 10**6)), **asked)]
    ranks = data.draw(st.integers(1, min(vocab_size, 4)))
    assert chosen(logits, rows, ranks) == expected(logits, rows, ranks)


@pytest.mark.parametrize("asked", [{"top_k": 17}, {"top_p": 0.7}, {"top_p": 0.7, "top_k": 25}])
def test_choose_on_device_cuts_among_equal_logits(asked: dict[str, Any]) -> None:
    # All tokens are named: first those that were kept, by their noise, then the others by their ids.
    logits = torch.zeros(1, 30)
    logits[0, 20] = 1.0
    rows = [row(1, **asked)]
    assert chosen(logits, rows, 30) == expected(logits, rows, 30)


def test_choose_on_device_rounds_the_mass_of_equals_as_the_reference() -> None:
    # A fiftieth is a little less in float32: 35 of them are not quite seven tenths.
    logits, rows = torch.zeros(1, 50), [row(1, top_p=0.7)]
    assert int((process(logits, rows) == 0).sum()) == 36
    assert chosen(logits, rows, 40) == expected(logits, rows, 40)


def test_choose_on_device_bans_tokens_outside_the_mask(small_chunks: None) -> None:
    num_rows, vocab_size = len(ROWS), 517
    logits = random(num_rows, vocab_size)
    is_allowed = random(num_rows, vocab_size, seed=9) > 1.0
    padded = np.pad(is_allowed.numpy(), ((0, 0), (0, -vocab_size % 32)))
    allowed = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    masked = logits.masked_fill(~is_allowed, -INFINITY)
    assert chosen(logits, ROWS, 2, allowed) == expected(masked, ROWS, 2)


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}])
def test_choose_on_device_reports_rows_that_are_not_finite(asked: dict[str, Any]) -> None:
    logits = torch.zeros(6, 37)
    logits[1, 30] = torch.nan
    logits[2, 3] = INFINITY
    logits[3] = -INFINITY
    logits[4, 5] = -INFINITY
    logits[5] = -INFINITY
    logits[5, 36] = 1.0
    found = choice.choose_on_device(logits.to(DEVICE), packed([row(**asked)] * 6), 2)
    assert found.are_valid.tolist() == [True, False, False, False, True, True]
    assert ((found.top_tokens >= 0) & (found.top_tokens < 37)).all()
    assert (found.top_tokens[:, 0] != found.top_tokens[:, 1]).all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_choose_on_device_reports_rows_without_tokens_and_with_overflow() -> None:
    logits = torch.zeros(3, 40)
    logits[:, 7] = 1e38
    allowed = torch.tensor([[-1, -1], [0, 0], [-1, -1]], dtype=torch.int32)
    rows = [row(), row(), row(temperature=0.01)]
    found = choice.choose_on_device(logits.to(DEVICE), packed(rows), 1, allowed.to(DEVICE))
    assert found.are_valid.tolist() == [True, False, False]


@dataclass(frozen=True)
class Outcome:
    """What a step is told."""

    top_tokens: list[list[tuple[int, ...]]]
    are_valid: list[list[bool]]
    are_finite: list[bool]
    processed: list[Tensor]


def step(logits: Tensor, rows: list[list[ChoiceContext]], ranks: int, are_finite: Tensor) -> Outcome:
    choices, finite = sampler.choose_tokens(logits.to(DEVICE), rows, are_finite.to(DEVICE), ranks)
    return Outcome(
        [choice.top_tokens for choice in choices],
        [choice.are_valid for choice in choices],
        finite,
        [choice.processed.cpu() for choice in choices if choice.contexts],
    )


def test_choose_tokens_gives_the_same_on_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[row(), row(1, logit_bias={3: 30.0}, top_p=0.9)], [], [row(2, bad_token_ids=(4, 5))]]
    logits, are_finite = random(3, 50).bfloat16(), torch.tensor([True, False, True, True])
    logits[2, 4] = torch.nan  # in spite of the ban the row is not valid
    outcomes = []
    for has_kernels in (False, True):
        monkeypatch.setattr(sampler, "_has_kernels", lambda logits, value=has_kernels: value)
        outcomes.append(step(logits, rows, 2, are_finite))
    usual, on_device = outcomes
    assert usual.top_tokens[:2] == on_device.top_tokens[:2]
    assert usual.top_tokens[0][1][0] == 3
    assert usual.are_valid == on_device.are_valid == [[True, True], [], [False]]
    assert usual.are_finite == on_device.are_finite == [True, False, True, True]
    for expected, found in zip(usual.processed, on_device.processed, strict=True):
        assert torch.equal(expected, found)


def test_choose_tokens_packs_masks_of_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def masked(index: int, *allowed: int, **chosen: Any) -> ChoiceContext:
        mask = np.zeros(64, np.uint8)
        mask[[*allowed]] = 1
        packed = np.packbits(mask, bitorder="little").view(np.int32)
        return replace(row(index, **chosen), mask=packed)

    rows = [
        [masked(0, 3, 49), row(1), masked(2, 40, temperature=0.0)],
        [masked(3, 7, 8, 9, top_k=2, logprobs=1)],
    ]
    adjusted = [[masked(4, 3, 4, bad_token_ids=(3,)), masked(5, 9, allowed_token_ids=(8,)), masked(6)]]
    monkeypatch.setattr(choice, "CHUNK", 256)
    for asked in (rows, adjusted):
        count = sum(map(len, asked))
        logits, are_finite = random(count, 50), torch.ones(1, dtype=torch.bool)
        outcomes = []
        for has_kernels in (False, True):
            monkeypatch.setattr(sampler, "_has_kernels", lambda logits, value=has_kernels: value)
            outcomes.append(step(logits, asked, 1, are_finite))
        assert outcomes[0].top_tokens == outcomes[1].top_tokens
        assert outcomes[0].are_valid == outcomes[1].are_valid == [[True] * len(part) for part in asked]
    assert outcomes[1].top_tokens == [[(4,), (0,), (0,)]]  # a row that allows nothing ends


def test_choose_tokens_without_rows_tells_what_is_finite() -> None:
    choices, are_finite = sampler.choose_tokens(torch.empty(0, 9), [[], []], torch.tensor([True, False]))
    assert [choice.top_tokens for choice in choices] == [[], []]
    assert are_finite == [True, False]
