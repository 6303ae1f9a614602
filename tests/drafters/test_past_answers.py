"""What is kept of past answers, for whom, and how much."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import Draft
from outrider.drafters.occurrences import Occurrences
from outrider.drafters.past_answers import LONGEST_ANSWER, NOBODYS, PastAnswers, Scope
from outrider.drafters.suffix import SuffixIndex

MINE, THEIRS = Scope("my key", "code"), Scope("their key", "code")
ANSWER = [1, 2, 3, 4, 5, 6]


def drafted(past: PastAnswers, scope: Scope, tokens: Sequence[int]) -> tuple[int, ...]:
    index = SuffixIndex(past, scope)
    index.append(tokens)
    return index.propose(8).tokens


def num_ngrams(text: Occurrences) -> int:
    """Number of tokens for which memory is held."""
    return sum(len(chain.newest) for chain in text._chains)


def test_suffix_drafts_from_a_past_answer() -> None:
    past = PastAnswers(100)
    past.add(MINE, ANSWER)
    assert drafted(past, MINE, [9, 1, 2, 3]) == (4, 5, 6)


@pytest.mark.parametrize(
    "scope", [THEIRS, Scope("my key", "prose"), Scope("my key"), Scope("", "code"), NOBODYS], ids=str
)
def test_suffix_never_drafts_from_another_caller_or_task(scope: Scope) -> None:
    past = PastAnswers(100)
    past.add(MINE, ANSWER)
    assert drafted(past, scope, [1, 2, 3]) == ()


def test_past_answers_of_unknown_callers_are_not_kept() -> None:
    past = PastAnswers(100)
    past.add(NOBODYS, ANSWER)
    past.add(Scope(None, "code"), ANSWER)
    assert len(past) == 0
    assert drafted(past, NOBODYS, [1, 2, 3]) == ()


def test_past_answers_with_0_tokens_keep_nothing() -> None:
    past = PastAnswers(0)
    past.add(MINE, ANSWER)
    assert len(past) == 0
    assert drafted(past, MINE, [1, 2, 3]) == ()


def test_past_answers_forget_the_oldest_of_all_scopes_first() -> None:
    past = PastAnswers(3 * (len(ANSWER) + 1))
    past.add(THEIRS, ANSWER)
    for first in (10, 20):
        past.add(MINE, [first + token for token in ANSWER])
    assert drafted(past, THEIRS, [1, 2]) == (3, 4)
    past.add(MINE, [30 + token for token in ANSWER])
    assert drafted(past, THEIRS, [1, 2]) == ()
    assert [drafted(past, MINE, [first + 1, first + 2]) for first in (10, 20, 30)] == [
        (first + 3, first + 4) for first in (10, 20, 30)
    ]
    past.add(THEIRS, ANSWER)
    assert drafted(past, MINE, [11, 12]) == ()
    assert drafted(past, MINE, [21, 22]) == (23, 24)


def test_past_answers_keep_the_end_of_a_long_answer() -> None:
    past = PastAnswers(5)
    past.add(MINE, ANSWER)
    assert drafted(past, MINE, [3, 4]) == (5, 6)
    assert drafted(past, MINE, [1, 2]) == ()
    past = PastAnswers(10 * LONGEST_ANSWER)
    past.add(MINE, range(2 * LONGEST_ANSWER))
    assert len(past) == LONGEST_ANSWER + 1


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from([MINE, THEIRS]), st.lists(st.integers(0, 3), max_size=50))),
)
def test_past_answers_have_no_more_tokens_than_allowed(
    limit: int, answers: list[tuple[Scope, list[int]]]
) -> None:
    past = PastAnswers(limit)
    for scope, answer in answers:
        past.add(scope, answer)
        held = [past.of(scope) for scope in (MINE, THEIRS)]
        assert sum(map(len, held)) == len(past) <= limit
        assert sum(map(num_ngrams, held)) <= 4 * limit  # nothing is left of what went


def test_suffix_prefers_its_own_text_if_it_promises_more() -> None:
    past = PastAnswers(100)
    past.add(MINE, [1, 2, 7, 7])
    assert drafted(past, MINE, [1, 2, 5, 6, 1, 2]) == (5, 6)
    assert drafted(past, MINE, [2, 5, 6, 1, 2]) == (7, 7)


def test_suffix_of_a_text_without_repeats_drafts_nothing() -> None:
    assert SuffixIndex().propose(8) == Draft()


def test_past_answers_keep_an_answer_once_that_several_drafters_of_a_sequence_add() -> None:
    past = PastAnswers(100)
    past.add(MINE, ANSWER)
    past.add(MINE, ANSWER)
    assert len(past) == len(ANSWER) + 1
    past.add(MINE, [7, 8])
    past.add(MINE, ANSWER)
    assert len(past) == 2 * (len(ANSWER) + 1) + 3


def test_newest_past_answers_are_those_of_the_scope_as_far_as_there_is_room() -> None:
    past = PastAnswers(100)
    for answer in ([1, 2, 3], [4, 5], [6]):
        past.add(MINE, answer)
    past.add(THEIRS, [9])
    assert past.newest(MINE, 100) == [(1, 2, 3), (4, 5), (6,)]
    assert past.newest(MINE, 7) == [(3,), (4, 5), (6,)]
    assert past.newest(Scope("nobody's key"), 7) == []
    assert past.newest(MINE, 0) == []
