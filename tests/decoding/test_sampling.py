"""What each sampling setting does to a row, at every position, and that rows do not disturb each other."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.noise import gumbel
from outrider.decoding.penalties import leave_an_end
from outrider.decoding.sampling import (
    SETTINGS,
    choose,
    needs_no_text,
    probabilities,
    process,
    scores,
)
from outrider.decoding.settings import Sampling
from outrider.decoding.truncation import ties_after

BANNED = -math.inf
LOGITS = torch.tensor([0.5, -1.0, 2.0, 1.0, 0.0])
PROMPT = [0, 1, 1]
GENERATED = [2, 2, 9]  # 9 is beyond the vocabulary and ignored
END = frozenset({4})


ASKED_FOR = [setting for setting in SETTINGS if setting.apply is not leave_an_end]


def row(path: tuple[int, ...] = (), **chosen: Any) -> ChoiceContext:
    position = len(PROMPT) + len(GENERATED) + len(path)
    return ChoiceContext(
        Sampling(**{"max_tokens": 100, **chosen}), 77, position, PROMPT, GENERATED, path, END
    )


def processed(one: ChoiceContext, logits: Tensor = LOGITS) -> list[float]:
    result: list[float] = process(logits[None], [one])[0].tolist()
    return result


@pytest.mark.parametrize(
    ("chosen", "path", "expected"),
    [
        ({}, (), [0.5, -1.0, 2.0, 1.0, 0.0]),
        ({"temperature": 0.5}, (), [1.0, -2.0, 4.0, 2.0, 0.0]),
        ({"temperature": 0.0}, (), [0.5, -1.0, 2.0, 1.0, 0.0]),
        ({"logit_bias": {1: 3.0, 4: -1.0, 9: 5.0}}, (), [0.5, 2.0, 2.0, 1.0, -1.0]),
        ({"repetition_penalty": 2.0}, (), [0.25, -2.0, 1.0, 1.0, 0.0]),
        ({"repetition_penalty": 2.0}, (3,), [0.25, -2.0, 1.0, 0.5, 0.0]),
        ({"presence_penalty": 0.25}, (), [0.5, -1.0, 1.75, 1.0, 0.0]),
        ({"presence_penalty": 0.25}, (3, 2), [0.5, -1.0, 1.75, 0.75, 0.0]),
        ({"frequency_penalty": 0.25}, (), [0.5, -1.0, 1.5, 1.0, 0.0]),
        ({"frequency_penalty": 0.25}, (2, 3), [0.5, -1.0, 1.25, 0.75, 0.0]),
        ({"allowed_token_ids": (0, 3, 9)}, (), [0.5, BANNED, BANNED, 1.0, BANNED]),
        ({"bad_token_ids": (2, 9)}, (), [0.5, -1.0, BANNED, 1.0, 0.0]),
        ({"min_tokens": 4}, (), [0.5, -1.0, 2.0, 1.0, BANNED]),
        ({"min_tokens": 4}, (0,), [0.5, -1.0, 2.0, 1.0, 0.0]),
        ({"top_k": 2}, (), [BANNED, BANNED, 2.0, 1.0, BANNED]),
        ({"top_k": 9}, (), [0.5, -1.0, 2.0, 1.0, 0.0]),
        ({"top_p": 0.5}, (), [BANNED, BANNED, 2.0, BANNED, BANNED]),
        ({"top_p": 0.6}, (), [BANNED, BANNED, 2.0, 1.0, BANNED]),
        ({"top_p": 1e-9}, (), [BANNED, BANNED, 2.0, BANNED, BANNED]),
        ({"min_p": 0.3}, (), [BANNED, BANNED, 2.0, 1.0, BANNED]),
        ({"min_p": 1.0}, (), [BANNED, BANNED, 2.0, BANNED, BANNED]),
        # After temperature the likeliest token is further ahead.
        ({"min_p": 0.3, "temperature": 0.5}, (), [BANNED, BANNED, 4.0, BANNED, BANNED]),
        # A bias cannot lift a ban.
        ({"logit_bias": {2: 50.0}, "bad_token_ids": (2,)}, (), [0.5, -1.0, BANNED, 1.0, 0.0]),
        # top_p counts the mass of what top_k has left: 0.73 of it is token 2's.
        ({"top_k": 2, "top_p": 0.7}, (), [BANNED, BANNED, 2.0, BANNED, BANNED]),
        # Truncation cannot change a greedy choice, and alternatives are left.
        ({"temperature": 0.0, "top_k": 1}, (), [0.5, -1.0, 2.0, 1.0, 0.0]),
        # Rejection sampling or block verification looks at distributions, and temperature 0 is one-hot.
        ({"temperature": 0.0, "verification": "block"}, (), [BANNED, BANNED, 2.0, BANNED, BANNED]),
    ],
)
def test_process_applies_a_setting_to_its_row(
    chosen: dict[str, Any], path: tuple[int, ...], expected: list[float]
) -> None:
    assert processed(row(path, **chosen)) == pytest.approx(expected)


@pytest.mark.parametrize("peer", ["repetition", "top_k", "top_p", "min_p"])
def test_settings_agree_with_transformers(peer: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)) * 2
    tokens = torch.tensor([[3, 7, 7, 12]] * 3)
    peers: dict[str, tuple[Any, dict[str, Any]]] = {
        "repetition": (RepetitionPenaltyLogitsProcessor(1.4), {"repetition_penalty": 1.4}),
        "top_k": (TopKLogitsWarper(7), {"top_k": 7}),
        "top_p": (TopPLogitsWarper(0.8), {"top_p": 0.8}),
        "min_p": (MinPLogitsWarper(0.1), {"min_p": 0.1}),
    }
    reference, asked = peers[peer]
    rows = [ChoiceContext(Sampling(**asked), 0, 4, [3, 7], [7], (12,)) for _ in range(3)]
    assert torch.equal(process(logits, rows), reference(tokens, logits.clone()))


@pytest.mark.parametrize(
    ("chosen", "kept"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.5}, {0, 1}), ({"top_k": 3}, {0, 1, 2})]
)
def test_truncation_of_equals_at_the_boundary_keeps_lower_ids(chosen: dict[str, Any], kept: set[int]) -> None:
    values = processed(row(**chosen), torch.zeros(4))
    assert {token for token, value in enumerate(values) if value > BANNED} == kept


def test_equals_below_the_likeliest_are_cut_in_the_middle() -> None:
    values = processed(row(top_k=3), torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0]))
    assert values == [1.0, 5.0, 1.0, BANNED, BANNED]


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("vocab_size", [100, 20_000, 20_011])
def test_large_vocabulary_is_truncated_like_a_small_one(spread: float, vocab_size: int) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    rows = [row(top_p=0.7), row(top_k=60)]
    kept = process(logits, rows) > BANNED
    order = logits.sort(dim=1, descending=True, stable=True).indices
    mass = logits.double().softmax(dim=1).gather(1, order).cumsum(dim=1)
    count = int((mass[0] < 0.7).sum()) + 1
    # With thousands of equally likely tokens the sum of float32 probabilities may be a token off.
    assert abs(int(kept[0].sum()) - count) <= (2 if spread < 1.0 else 0)
    assert kept[0, order[0, : int(kept[0].sum())]].all()
    assert set(kept[1].nonzero().flatten().tolist()) == set(order[1, :60].tolist())


MIXED = [
    row(),
    row(temperature=0.0),
    row((3,), temperature=0.7, top_k=3),
    row((3, 2), top_p=0.8, frequency_penalty=0.5),
    row(min_p=0.2, repetition_penalty=1.3, logit_bias={1: 1.0}),
    row(temperature=0.0, bad_token_ids=(2,), presence_penalty=1.0),
    row(min_tokens=9, allowed_token_ids=(0, 2, 4)),
]


@given(st.permutations(range(len(MIXED))), st.integers(1, len(MIXED)), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_row_does_not_depend_on_its_batch(order: list[int], size: int, seed: int) -> None:
    logits = torch.randn(len(MIXED), 5, generator=torch.Generator().manual_seed(seed)) * 2
    picked = order[:size]
    rows = [MIXED[index] for index in picked]
    together = process(logits[picked], rows)
    chosen = choose(together, rows)
    for place, index in enumerate(picked):
        alone = process(logits[index : index + 1], [MIXED[index]])
        assert torch.equal(alone[0], together[place])
        assert choose(alone, [MIXED[index]])[0] == chosen[place]


@pytest.mark.parametrize("chosen", [{}, {"top_p": 0.9}, {"top_k": 40}, {"temperature": 0.6}])
def test_row_of_a_large_vocabulary_does_not_depend_on_its_batch(chosen: dict[str, Any]) -> None:
    logits = torch.randn(6, 32_000, generator=torch.Generator().manual_seed(2)) * 4
    rows = [ChoiceContext(Sampling(**chosen), 10**9 + index, index, PROMPT, GENERATED) for index in range(6)]
    together = process(logits, rows)
    chosen_together = choose(together, rows)
    for index in range(6):
        alone = process(logits[index : index + 1], rows[index : index + 1])
        assert torch.equal(alone[0], together[index])
        assert choose(alone, rows[index : index + 1])[0] == chosen_together[index]


def test_logits_of_the_caller_are_left_alone() -> None:
    logits = torch.randn(len(MIXED), 5)
    before = logits.clone()
    choose(process(logits, MIXED), MIXED)
    assert torch.equal(logits, before)
    plain = [row(), row(temperature=0.0)]
    assert process(logits[:2], plain).data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_processed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 50).to(dtype)
    rows = [row(temperature=0.7, top_p=0.9), row()]
    assert process(logits, rows).dtype == torch.float32
    assert torch.equal(process(logits, rows), process(logits.float(), rows))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    greedy = [row(temperature=0.0)]
    assert choose(logits, greedy).tolist() == [1]
    assert gumbel_max(logits, greedy, 4)[0].tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [5, 5000, 20_011])
def test_search_by_bounds_finds_what_all_the_noise_finds(spread: float, vocab_size: int) -> None:
    rows = [ChoiceContext(Sampling(), 10**12 + index, index, (), ()) for index in range(8)]
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(5)) * spread
    keys, positions = [context.noise_key for context in rows], [context.position for context in rows]
    expected = (logits + gumbel(keys, positions, vocab_size)).topk(4, dim=1)
    token_ids, values = gumbel_max(logits, rows, 4)
    assert torch.equal(token_ids, expected.indices)
    assert torch.equal(values, expected.values)
    assert torch.equal(choose(logits, rows), expected.indices[:, 0])


def test_search_goes_on_while_a_bound_allows_a_better_token() -> None:
    # A bound is loosest where the noise is small: many tokens so likely that only small noise decides.
    rows = [ChoiceContext(Sampling(), 3, 5, (), ())]
    logits = torch.full((1, 20_000), -60.0)
    logits[0, ::64] = 0.0
    expected = (logits + gumbel([3], [5], 20_000)).topk(250, dim=1)
    assert torch.equal(gumbel_max(logits, rows, 250)[0], expected.indices)


def test_search_takes_the_lowest_ids_among_equals() -> None:
    # At this size a float32 has no room for the noise.
    rows = [ChoiceContext(Sampling(), 3, 5, (), ())]
    assert gumbel_max(torch.full((1, 20_000), 1e9), rows, 3)[0].tolist() == [[0, 1, 2]]


def test_ranked_tokens_are_different_with_the_choice_first() -> None:
    logits = torch.randn(len(MIXED), 5)
    values = process(logits, MIXED)
    ranked = gumbel_max(values, MIXED, 5)[0]
    assert torch.equal(ranked[:, 0], choose(values, MIXED))
    assert all(sorted(tokens) == [0, 1, 2, 3, 4] for tokens in ranked.tolist())


@pytest.mark.parametrize(("end_token_ids", "token"), [(frozenset({4, 3}), 3), (frozenset(), 0)])
def test_row_without_a_token_left_ends_the_generation(end_token_ids: frozenset[int], token: int) -> None:
    stuck = ChoiceContext(Sampling(bad_token_ids=(0, 1, 2, 3, 4)), 7, 0, (), (), end_token_ids=end_token_ids)
    fine = row()
    values = process(LOGITS.expand(2, -1), [stuck, fine])
    assert choose(values, [stuck, fine])[0] == token


def test_value_of_a_banned_alternative_is_banned() -> None:
    rows = [row(temperature=0.0), row(temperature=0.0, allowed_token_ids=(3,))]
    _, values = gumbel_max(process(LOGITS.expand(2, -1), rows), rows, 2)
    assert values.tolist() == [[2.0, 1.0], [1.0, BANNED]]


def test_probabilities_are_those_the_choice_has() -> None:
    rows = [row(temperature=0.5, top_k=2), row(temperature=0.0, verification="rejection")]
    probs = probabilities(process(LOGITS.expand(2, -1), rows))
    assert probs[0].tolist() == pytest.approx([0, 0, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0])
    assert probs[1].tolist() == [0, 0, 1, 0, 0]


def test_log_probabilities_are_of_the_tokens_and_of_the_likeliest_that_are_not_banned() -> None:
    values = process(LOGITS.expand(2, -1), [row(), row(temperature=0.5, top_k=2)])
    free, truncated = scores(values, [2, 3], 3)
    for told, of_row in ((free, values[0]), (truncated, values[1])):
        expected = of_row.log_softmax(dim=0)
        assert [value for _, value in told.top] == pytest.approx(
            [float(expected[token]) for token, _ in told.top]
        )
    assert free.chosen == pytest.approx(float(LOGITS.log_softmax(dim=0)[2]))
    assert [token for token, _ in free.top] == [2, 3, 0]
    assert [token for token, _ in truncated.top] == [2, 3]
    [only_chosen] = scores(LOGITS[None], [1], 0)
    assert only_chosen.top == ()


def test_settings_have_one_entry_each() -> None:
    asked: list[dict[str, Any]] = [
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"allowed_token_ids": (1,)},
        {"bad_token_ids": (1,)},
        {"min_tokens": 9},
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 0.5},
    ]
    for chosen in asked:
        assert sum(setting.applies(row(**chosen)) for setting in ASKED_FOR) == 1
    assert not any(setting.applies(row()) for setting in SETTINGS)


@pytest.mark.parametrize("chosen", [{"top_k": 300}, {"top_p": 0.6}, {"top_k": 900, "top_p": 0.8}])
def test_truncation_of_many_equals_in_a_large_vocabulary_keeps_lower_ids(chosen: dict[str, Any]) -> None:
    # As large numbers in bfloat16 are.
    logits = (torch.randn(4, 50_021, generator=torch.Generator().manual_seed(6)) * 3).bfloat16()
    kept = process(logits, [row(**chosen)] * 4) > BANNED
    order = logits.float().sort(dim=1, descending=True, stable=True).indices
    cut_among_equals = 0
    for numbers, which, likeliest in zip(logits, kept, order, strict=True):
        count = int(which.sum())
        assert which[likeliest[:count]].all()
        cut_among_equals += int(numbers[likeliest[count - 1]] == numbers[likeliest[count]])
    assert cut_among_equals


@given(st.integers(1, 200), st.floats(0, 1), st.data())
@settings(max_examples=60)
def test_ties_after_a_number_of_them_are_found(vocab_size: int, share: float, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10**6))
    is_tie = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(seed)) < share
    counts = torch.tensor(data.draw(st.lists(st.integers(1, vocab_size), min_size=3, max_size=3)))
    expected = is_tie & (is_tie.cumsum(dim=1) > counts[:, None])
    assert torch.equal(ties_after(is_tie, counts), expected)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        (
            {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop_token_ids": (3,)},
            True,
        ),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"min_tokens": 1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"bad_token_ids": (1,)}, False),
        ({"allowed_token_ids": (1,)}, False),
        ({"grammar": "start: /a/"}, False),
    ],
)
def test_needs_no_text_is_true_for_settings_without_token_names(
    chosen: dict[str, Any], expected: bool
) -> None:
    assert needs_no_text(Sampling(**chosen)) is expected
