"""Verdict of an audit: wrong tokens, near-ties, and too many of them."""

import math

import pytest

from outrider.decoding.settings import Sampling
from outrider.receipts.receipt import Numerics
from outrider.receipts.verdict import EXACT_TOLERANCE, ROUNDED_TOLERANCE, judged, tolerance_of

PLAIN = Sampling(max_tokens=10)


def test_verdict_on_chosen_tokens_is_no_difference() -> None:
    verdict = judged([0.0] * 50, PLAIN, 1e-3)
    assert (verdict.tokens, verdict.near_ties, verdict.wrong, verdict.first) == (50, 0, 0, None)
    assert not verdict.differs
    assert verdict.reason == ""


def test_verdict_tells_near_ties_from_wrong_tokens() -> None:
    verdict = judged([0.0, 5e-4, 0.3, math.inf, 0.0], PLAIN, 1e-3)
    assert (verdict.near_ties, verdict.wrong, verdict.first, verdict.margin) == (1, 2, 2, 0.3)
    assert verdict.reason == "token 2 is 0.3 nats from the choice"


def test_verdict_below_temperature_1_allows_for_larger_rounding() -> None:
    margins = [0.0] * 50 + [1.5e-3]
    assert judged(margins, PLAIN, 1e-3).differs
    assert not judged(margins, Sampling(temperature=0.5), 1e-3).differs


def test_verdict_on_more_near_ties_than_rounding_explains_is_a_difference() -> None:
    few, many = ([5e-4] * count + [0.0] * (1000 - count) for count in (4, 20))
    assert not judged(few, PLAIN, 1e-3).differs
    verdict = judged(many, PLAIN, 1e-3)
    assert verdict.first is None
    assert verdict.reason == "20 near-ties are more than rounding explains"


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        (Numerics(dtype="float32"), EXACT_TOLERANCE),
        (Numerics(dtype="float32", quantization="int8"), ROUNDED_TOLERANCE),
        (Numerics(dtype="float32", cache_dtype="float8_e4m3fn"), ROUNDED_TOLERANCE),
        (Numerics(dtype="bfloat16"), ROUNDED_TOLERANCE),
        (Numerics(dtype="bfloat16", batch_invariant=True), EXACT_TOLERANCE),
    ],
)
def test_tolerance_is_small_if_numbers_do_not_depend_on_the_batch(
    numerics: Numerics, expected: float
) -> None:
    assert tolerance_of(numerics) == expected
