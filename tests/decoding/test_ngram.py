"""Prompt lookup: the continuation of the latest, longest repetition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.ngram import NgramIndex


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    assert NgramIndex([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]).propose(1).tokens == (7,)


def test_among_equals_the_latest_occurrence_wins() -> None:
    assert NgramIndex([5, 1, 5, 2, 5]).propose(1).tokens == (2,)


def test_nothing_is_drafted_without_a_repetition() -> None:
    assert len(NgramIndex([1, 2, 3]).propose(4)) == 0
    assert len(NgramIndex().propose(4)) == 0


def test_repetition_is_followed_to_any_depth() -> None:
    assert NgramIndex([0, 4, 0, 4]).propose(5).tokens == (0, 4, 0, 4, 0)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_appending_in_parts_changes_nothing(tokens: list[int], cut: int) -> None:
    in_parts = NgramIndex(tokens[:cut])
    in_parts.append(tokens[cut:])
    assert in_parts.propose(4) == NgramIndex(tokens).propose(4)


def test_sizes_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="shortest=4"):
        NgramIndex(longest=3, shortest=4)
