"""Drafts read off a prediction, and the place found again after edits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.prediction import NEAR, PredictionIndex, foreseen

TEXT = list(range(100, 140))
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def test_guess_tells_how_many_tokens_before_it_were_foreseen() -> None:
    index = PredictionIndex(TEXT, 0)
    known = []
    for token in (*TEXT[:2], 1, TEXT[3]):
        index.append([token])
        known.append(index.guess(3).matched)
    assert known == [2, 3, 1, 2]
    assert index.guess(3).tokens == tuple(TEXT[4:7])


def drafted(prediction: list[int], answer: list[int], depth: int = 3) -> list[int]:
    """Returns the Draft after these tokens of the answer to a prompt of two tokens."""
    index = PredictionIndex(prediction, 2)
    index.append([7, 7, *answer])
    return list(index.propose(depth).tokens)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], TEXT[:3]),
        (TEXT[:5], TEXT[5:8]),
        (TEXT[:38], TEXT[38:]),  # fewer at the end
        (TEXT, []),
        ([*TEXT[:5], 1], TEXT[6:9]),  # perhaps a token in the place of another
        ([*TEXT[:5], 1, 2, TEXT[6]], TEXT[7:10]),  # two tokens in the place of one
        ([*TEXT[:5], 1, 2, 3, 4, TEXT[5]], TEXT[6:9]),  # tokens put in
        ([*TEXT[:5], TEXT[5 + NEAR - 1]], TEXT[5 + NEAR : 8 + NEAR]),  # tokens left out
        ([*TEXT[:5], *TEXT[30:32]], TEXT[32:35]),  # many tokens left out
        ([*TEXT[:5], TEXT[30]], TEXT[6:9]),  # a single token far ahead says nothing
        ([*TEXT[:20], *TEXT[3:5]], TEXT[5:8]),  # tokens said once more
    ],
    ids=str,
)
def test_prediction_after_an_edit_finds_its_place(answer: list[int], expected: list[int]) -> None:
    assert drafted(TEXT, answer) == expected


def test_prediction_with_several_occurrences_takes_the_longest_match() -> None:
    prediction = [1, 2, 9, 50, 4, 2, 9, 60]
    assert drafted([3, *prediction], [1, 2, 9], depth=1) == [50]
    assert drafted([3, *prediction], [4, 2, 9], depth=1) == [60]


def test_prediction_with_equal_matches_takes_the_next() -> None:
    lines = [5, 6, 1, 5, 6, 2, 5, 6, 3]
    assert drafted(lines, [5, 6, 1, 8, 5, 6], depth=1) == [2]


def test_prediction_that_is_wrong_from_the_beginning_may_be_right_later() -> None:
    """A thought comes before the predicted answer."""
    thought = [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafted(TEXT, [*thought, *TEXT[:2]]) == TEXT[2:5]


def test_prediction_that_is_empty_drafts_nothing() -> None:
    assert drafted([], []) == []
    assert drafted([], [1, 2]) == []


@given(TOKENS, TOKENS, st.integers(0, 40), st.integers(0, 5))
def test_prediction_whose_answer_comes_in_parts_drafts_equally(
    prediction: list[int], answer: list[int], split: int, prompt: int
) -> None:
    whole, parts = PredictionIndex(prediction, prompt), PredictionIndex(prediction, prompt)
    tokens = [9] * prompt + answer
    whole.append(tokens)
    parts.append(tokens[:split])
    for token in tokens[split:]:
        parts.append([token])
    assert whole.propose(8) == parts.propose(8)
    assert len(whole) == len(parts) == len(tokens)


@given(TOKENS, TOKENS)
def test_foreseen_tokens_are_tokens_of_the_answer_that_a_draft_would_have_had(
    prediction: list[int], answer: list[int]
) -> None:
    index, count = PredictionIndex(prediction, 0), 0
    for token in answer:
        count += index.propose(1).tokens == (token,)
        index.append([token])
    assert foreseen(prediction, answer) == count


def test_foreseen_tokens_of_an_edited_text_are_all_but_the_edit() -> None:
    answer = [*TEXT[:10], 1, 2, *TEXT[10:20], 3, *TEXT[21:]]
    assert len(TEXT) - 4 <= foreseen(TEXT, answer) <= len(TEXT) - 1
