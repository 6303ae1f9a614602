"""Margins: how far a token is from being the choice under keyed noise."""

import math
from typing import Any

import pytest
import torch

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.margins import margins
from outrider.decoding.sampling import choose, process
from outrider.decoding.settings import Sampling

VOCAB_SIZE, ROWS = 300, 150
NUDGE = 0.02  # nats, most by which a logit moves
# With two moved logits a difference moves by twice as much; rounding adds the rest.
MOST = 2.02 * NUDGE
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
    "penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}},
}


def rows_of(sampling: Sampling, count: int = ROWS) -> list[ChoiceContext]:
    return [ChoiceContext(sampling, 11, 4 + row, (1, 2), (3, 4)) for row in range(count)]


def logits_of(count: int = ROWS) -> torch.Tensor:
    return 2.5 * torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


def chosen(logits: torch.Tensor, rows: list[ChoiceContext]) -> list[int]:
    return choose(process(logits, rows), rows).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_margins_of_chosen_tokens_are_zero(name: str) -> None:
    logits, rows = logits_of(), rows_of(Sampling(**SETTINGS[name]))
    assert margins(logits, rows, chosen(logits, rows)) == [0.0] * ROWS


@pytest.mark.parametrize("name", SETTINGS)
def test_margins_of_what_moved_logits_choose_are_at_most_the_move(name: str) -> None:
    sampling = Sampling(**SETTINGS[name])
    logits, rows = logits_of(), rows_of(sampling)
    found = []
    for seed in range(8):
        moves = torch.rand(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        found += margins(logits, rows, chosen(logits + NUDGE * moves, rows))
    most = MOST * sampling.repetition_penalty / (sampling.temperature or 1.0)
    assert any(found), "a move has changed a choice"
    assert max(found) <= most


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_margin_of_a_token_outside_of_the_truncation_is_its_distance_from_it(name: str) -> None:
    logits, (row,) = logits_of(1), rows_of(Sampling(**SETTINGS[name]), 1)
    unlikely = int(logits[0].argsort(descending=True)[60])
    assert margins(logits, [row], [unlikely])[0] > 1.0


def test_margin_of_another_token_is_its_distance_from_the_best() -> None:
    logits, (row,) = logits_of(1), rows_of(Sampling(temperature=0), 1)
    best, second = logits[0].topk(2).values.tolist()
    ((_, token),) = logits.topk(2).indices.tolist()
    assert margins(logits, [row], [token]) == [pytest.approx(best - second, abs=1e-5)]


def test_margin_of_a_banned_token_is_infinite() -> None:
    logits, (row,) = logits_of(1), rows_of(Sampling(bad_token_ids=(9,)), 1)
    assert margins(logits, [row], [9]) == [math.inf]
