"""Drafts looked up in the tokens themselves."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.ngram import NgramIndex


@pytest.mark.parametrize(
    ("tokens", "depth", "drafted"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, (4, 1)),
        ([1, 2, 9, 5, 2, 8, 1, 2], 1, (9,)),  # (1, 2) counts for more than the later (2,)
        ([5, 7, 5, 8, 5], 1, (8,)),  # the latest occurrence
        ([0, 1, 0], 2, (1, 0)),  # token id 0 is a token
        ([1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),  # repetition goes on
        ([5, 5], 3, (5, 5, 5)),
        ([1, 2, 3], 4, ()),
        ([1], 4, ()),
        ([], 4, ()),
        ([1, 2, 1], 0, ()),
    ],
)
def test_ngram_drafts_what_followed_the_longest_suffix(
    tokens: list[int], depth: int, drafted: tuple[int, ...]
) -> None:
    draft = NgramIndex(tokens).propose(depth)
    assert draft.tokens == drafted
    assert draft.is_chain


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 30))
def test_appending_bit_by_bit_is_the_same(tokens: list[int], split: int) -> None:
    index = NgramIndex(tokens[:split])
    for token in tokens[split:]:
        index.append([token])
    assert len(index) == len(tokens)
    assert index.propose(4) == NgramIndex(tokens).propose(4)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_ngram_first_token_followed_the_newest_token_before(tokens: list[int]) -> None:
    for drafted in NgramIndex(tokens).propose(1).tokens:
        assert (tokens[-1], drafted) in set(pairwise(tokens))


def test_short_suffixes_can_be_left_out() -> None:
    assert NgramIndex([1, 2, 3, 1], shortest=2).propose(2).tokens == ()
    assert NgramIndex([4, 1, 2, 3, 4, 1], shortest=2).propose(2).tokens == (2, 3)


@pytest.mark.parametrize(("longest", "shortest"), [(3, 0), (1, 2)])
def test_sizes_that_make_no_sense_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match=f"shortest={shortest}"):
        NgramIndex(longest=longest, shortest=shortest)
