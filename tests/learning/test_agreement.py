"""Comparison of guesses with the text that followed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.learning.agreement import Agreement, agreement

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@pytest.mark.parametrize(
    ("guess", "text", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], Agreement(3, 3)),
        ([1, 2, 3], [1, 9, 3], Agreement(1, 2)),
        ([1, 2], [9], Agreement(0, 1)),
        ([1, 2, 3], [1, 2], Agreement(2, 2)),
        ([1], [1, 2], Agreement(1, 1)),
        ([], [1], Agreement(0, 0)),
        ([1], [], Agreement(0, 0)),
    ],
    ids=["all_correct", "wrong_inside", "wrong_first", "short_text", "short_guess", "no_guess", "no_text"],
)
def test_agreement_counts_correct_tokens_and_those_that_the_text_reached(
    guess: list[int], text: list[int], expected: Agreement
) -> None:
    assert agreement(guess, text) == expected
    assert agreement(tuple(guess), tuple(text)) == expected


@given(TOKENS, TOKENS)
def test_agreement_counts_the_longest_common_beginning(guess: list[int], text: list[int]) -> None:
    correct = agreement(guess, text).correct
    assert guess[:correct] == text[:correct]
    assert guess[correct : correct + 1] != text[correct : correct + 1] or correct == len(guess) == len(text)
