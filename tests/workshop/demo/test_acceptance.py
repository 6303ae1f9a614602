"""How acceptance is counted from one reading of a finished text."""

import torch

from workshop.demo.acceptance import (
    RoundOutcome,
    agreement,
    foreseen,
    probabilities,
    rounds,
    until_end,
    written_texts,
)
from workshop.demo.pair import DRAFT, TARGET, new_model


def test_round_ends_at_the_first_token_the_draft_would_not_have_guessed() -> None:
    ranks = [0, 0, 3, 0, 0, 0, 0, 2, 1, 0]
    assert rounds(ranks, depth=4) == [RoundOutcome(2, 3), RoundOutcome(4, 2)]


def test_round_that_the_text_cuts_short_is_left_out() -> None:
    assert rounds([0, 0, 0, 0], depth=4) == []
    assert rounds([0, 0, 0, 0, 5], depth=4) == [RoundOutcome(4, 5)]


def test_branches_are_chosen_on_other_rounds_than_those_judged() -> None:
    seen = [RoundOutcome(4, 0)] * 3 + [RoundOutcome(0, 1)] * 2 + [RoundOutcome(1, 1)]
    judged = [RoundOutcome(4, 0), RoundOutcome(0, 1), RoundOutcome(1, 1), RoundOutcome(2, 5)]
    assert foreseen(seen, judged, branches=1) == 0.25
    assert foreseen(seen, judged, branches=2) == 0.5
    assert foreseen(seen, judged, branches=8) == 0.75


def test_text_ends_with_its_first_end_token() -> None:
    assert until_end([7, 8, 5, 9, 0]) == [7, 8, 5]
    assert until_end([7, 8]) == [7, 8]


def test_probabilities_at_temperature_zero_are_one_hot() -> None:
    assert probabilities(torch.tensor([[1.0, 3.0, 2.0]]), 0).tolist() == [[0, 1, 0]]


def test_model_foresees_its_own_text() -> None:
    torch.manual_seed(0)
    target = new_model(TARGET).eval()
    prompts = [[10, 11, 12], [20, 21, 22, 23, 24]]
    for temperature in (0.0, 1.0):
        for prompt, text in zip(prompts, written_texts(target, prompts, 20, temperature), strict=True):
            found = agreement(target, target, prompt, text, temperature)
            assert found.ranks == [0] * len(text)
            assert min(found.overlap) > 0.999


def test_unrelated_draft_does_not_foresee_it() -> None:
    torch.manual_seed(0)
    target, draft = new_model(TARGET).eval(), new_model(DRAFT).eval()
    for weight in draft.parameters():  # as made, both would repeat the last token
        torch.nn.init.normal_(weight)
    (text,) = written_texts(target, [[10, 11, 12]], 20, 0.0)
    found = agreement(target, draft, [10, 11, 12], text, 0.0)
    assert sum(rank == 0 for rank in found.ranks) < 10
