"""Two answers to one seeded request: where they part, and whether that is a near-tie."""

import math
from collections.abc import Mapping

import pytest
from scipy.stats import poisson

from workshop.checking.deployment import CheckedText
from workshop.checking.errors import CheckError
from workshop.checking.settings import Kind
from workshop.checking.side_by_side import (
    ANSWERED,
    END,
    AnswerDifference,
    AnswerPair,
    compared,
    near_ties_p_value,
)

TOLERANCE = 1e-3


def text(
    *tokens: str, finish: str = "length", at: Mapping[int, Mapping[str, float]] | None = None
) -> CheckedText:
    """at: the log-probabilities told at a position; elsewhere the token's own is -1."""
    told = [(at or {}).get(place, {token: -1.0}) for place, token in enumerate(tokens)]
    logprobs = tuple(logprobs[token] for logprobs, token in zip(told, tokens, strict=True))
    return CheckedText(tokens, logprobs, tuple(told), finish)


def parted(a: CheckedText, b: CheckedText, kind: Kind = "greedy") -> AnswerDifference:
    difference = compared(3, kind, a, b, TOLERANCE).difference
    assert difference is not None
    return difference


def test_compared_answers_that_are_equal_have_only_rounding_differences() -> None:
    pair = compared(3, "greedy", text("a", "b"), text("a", "b", at={1: {"b": -1.25}}), TOLERANCE)
    assert pair == AnswerPair(3, "greedy", 2, 0.25, 0.25, None)


@pytest.mark.parametrize(("margin", "is_near_tie"), [(0.0005, True), (0.002, False)])
def test_near_tie_without_noise_has_two_tokens_with_one_log_probability(
    margin: float, is_near_tie: bool
) -> None:
    a = text("a", "b", at={1: {"b": -1.0, "c": -1.0 - margin}})
    b = text("a", "c", at={1: {"c": -1.0, "b": -1.0 - margin / 2}})
    found = parted(a, b)
    assert (found.request, found.position, found.tokens) == (3, 1, ("b", "c"))
    assert found.gaps == pytest.approx((margin, -margin / 2))
    assert found.is_near_tie is is_near_tie


@pytest.mark.parametrize(("moved", "is_near_tie"), [(0.0005, True), (0.002, False)])
def test_near_tie_under_noise_depends_on_the_gaps_difference(moved: float, is_near_tie: bool) -> None:
    a = text("b", at={0: {"b": -1.0, "c": -3.0}})
    b = text("c", at={0: {"b": -1.0 - moved, "c": -3.0}})
    assert parted(a, b, "sampled").is_near_tie is is_near_tie


def test_token_that_was_not_likely_is_no_near_tie_without_noise_and_unknown_under_it() -> None:
    a, b = text("a"), text("b")
    assert parted(a, b).gaps == (None, None)
    assert not parted(a, b, "greedy").is_near_tie
    assert parted(a, b, "sampled").is_near_tie


def test_answer_that_ends_earlier_parts_there() -> None:
    found = parted(text("a", "b"), text("a", finish="stop"))
    assert (found.position, found.tokens, found.is_near_tie) == (1, ("b", END), False)


def test_compared_with_other_finish_reasons_is_a_difference() -> None:
    assert parted(text("a"), text("a", finish="stop")).tokens == (END, END)


def test_request_that_one_refuses_is_a_difference_and_one_that_both_refuse_is_none() -> None:
    refused = CheckedText((), (), (), None, refusal="B answers 400")
    assert parted(text("a"), refused, "sampled") == AnswerDifference(
        3, "sampled", 0, (ANSWERED, "B answers 400"), (None, None), False
    )
    with pytest.raises(CheckError, match="both refuse"):
        compared(3, "json", refused, refused, TOLERANCE)


@pytest.mark.parametrize("near_ties", [0, 1, 2, 5])
def test_near_ties_are_as_many_as_rounding_explains_by_poisson(near_ties: int) -> None:
    tie = AnswerDifference(0, "sampled", 0, ("a", "b"), (0.0, 0.0), True)
    pairs = [
        AnswerPair(0, "sampled", 100, 0.2, 0.1, tie if place < near_ties else None) for place in range(8)
    ]
    expected = poisson.sf(near_ties - 1, 2.0 * 8 * 0.2)
    assert near_ties_p_value(pairs) == pytest.approx(expected)


def test_near_ties_with_equal_log_probabilities_are_unexplained() -> None:
    tie = AnswerDifference(0, "sampled", 0, ("a", "b"), (0.0, 0.0), True)
    assert near_ties_p_value([AnswerPair(0, "sampled", 100, 0.0, 0.0, tie)]) == 0.0
    assert near_ties_p_value([AnswerPair(0, "sampled", 100, 0.0, 0.0, None)]) == 1.0
    assert math.isclose(near_ties_p_value([]), 1.0)
