"""Compares two answers to one seeded request: where they first differ, and whether rounding explains it.

With one seed both deployments choose each token under the same noise. If they choose different tokens, the
gap between the two tokens' log-probabilities must differ between the deployments, by at least the margin of
the choice. If it does not, something other than the logits made the choice. A choice whose margin is within
the tolerance is a near-tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.learning.poisson import at_least
from workshop.checking.deployment import CheckedText
from workshop.checking.errors import CheckError
from workshop.checking.settings import Kind

END = "(end)"  # stands for the token after the end of the shorter answer
ANSWERED = "(answered)"  # stands for the answer if the other deployment refused
# Changed choices per token and nat of rounding: two log-probabilities move, and the margin of the best token
# has a density below 1 near 0.
FLIPS_PER_NAT = 2.0


@dataclass(frozen=True)
class AnswerDifference:
    """First position at which two answers differ."""

    request: int
    kind: Kind
    position: int  # in the answer, from 0
    tokens: tuple[str, str]  # tokens at A and at B, or a message
    # nats at A and at B: log-probability of A's token minus that of B's token; None: not reported
    gaps: tuple[float | None, float | None]
    is_near_tie: bool


@dataclass(frozen=True)
class AnswerPair:
    """Comparison of the two answers to one request."""

    request: int
    kind: Kind
    compared: int  # tokens before the first difference
    rounding: float  # nats; sum over these tokens of the difference between their log-probabilities
    largest: float  # nats; largest of these differences
    difference: AnswerDifference | None


def compared(request: int, kind: Kind, a: CheckedText, b: CheckedText, tolerance: float) -> AnswerPair:
    """Compares two answers. Raises CheckError if both deployments refuse the request."""
    if a.refusal and b.refusal:
        raise CheckError(f"both refuse a request of the kind {kind!r}: {a.refusal}; {b.refusal}")
    if a.refusal or b.refusal:
        said = (a.refusal or ANSWERED, b.refusal or ANSWERED)
        return AnswerPair(
            request, kind, 0, 0.0, 0.0, AnswerDifference(request, kind, 0, said, (None, None), False)
        )
    shared = next(
        (place for place, (left, right) in enumerate(zip(a.tokens, b.tokens, strict=False)) if left != right),
        min(len(a.tokens), len(b.tokens)),
    )
    moved = [abs(left - right) for left, right in zip(a.logprobs[:shared], b.logprobs[:shared], strict=True)]
    difference = None
    if a.tokens != b.tokens or a.finish_reason != b.finish_reason:
        difference = _difference(request, kind, shared, a, b, tolerance)
    return AnswerPair(request, kind, shared, sum(moved), max(moved, default=0.0), difference)


def _difference(
    request: int, kind: Kind, position: int, a: CheckedText, b: CheckedText, tolerance: float
) -> AnswerDifference:
    first, second = (text.tokens[position] if position < len(text.tokens) else END for text in (a, b))
    gaps = tuple(_gap(text, position, first, second) for text in (a, b))
    return AnswerDifference(
        request, kind, position, (first, second), (gaps[0], gaps[1]), _is_near_tie(kind, gaps, tolerance)
    )


def _is_near_tie(kind: Kind, gaps: Sequence[float | None], tolerance: float) -> bool:
    """Whether rounding explains a difference.

    The gap itself is the margin of a greedy choice. For a sampled choice, the difference between the gaps
    bounds the margin. If a token is not among the likeliest, its gap is unknown, and the sampled choice
    counts as a near-tie. Only few near-ties are allowed.
    """
    at_a, at_b = gaps
    if kind == "greedy":
        return at_a is not None and at_b is not None and max(abs(at_a), abs(at_b)) <= tolerance
    return at_a is None or at_b is None or abs(at_a - at_b) <= tolerance


def _gap(text: CheckedText, position: int, first: str, second: str) -> float | None:
    """Returns the log-probability of the first token minus that of the second token, nats."""
    if position >= len(text.tokens):
        return None
    told = {**text.likeliest[position], text.tokens[position]: text.logprobs[position]}
    return told[first] - told[second] if first in told and second in told else None


def near_ties_p_value(pairs: Sequence[AnswerPair]) -> float:
    """Returns the probability of at least as many near-ties if only rounding makes answers differ.

    Changed choices are rare and independent, so their number has a Poisson distribution. Its mean is at most
    FLIPS_PER_NAT times the differences between log-probabilities, measured on the tokens that both chose.
    """
    near_ties = sum(pair.difference is not None and pair.difference.is_near_tie for pair in pairs)
    return at_least(near_ties, FLIPS_PER_NAT * sum(pair.rounding for pair in pairs))
