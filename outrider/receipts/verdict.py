"""Verdict of an audit on an answer, from the margins of its tokens and a tolerance."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decoding.settings import Sampling
from outrider.learning.poisson import at_least
from outrider.receipts.receipt import Numerics

# Nats by which rounding may change the difference of two logits. Log-probabilities of a token differ by at
# most 2e-5 in float32, and by about 0.2 in bfloat16.
EXACT_TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.4
# Near-ties per token and nat of tolerance: the density of the best token's margin is below 1 near 0.
TIES_PER_NAT = 1.0
FALSE_ALARM = 1e-6  # probability that an honest answer has too many near-ties


@dataclass(frozen=True)
class AuditVerdict:
    """Comparison of the tokens of an answer with the tokens that the audit would choose."""

    tokens: int
    near_ties: int  # tokens that the audit would not choose, by a margin within the tolerance
    wrong: int  # tokens with a margin beyond the tolerance
    first: int | None  # index of the first wrong token in the answer; None: no token is wrong
    margin: float  # margin of that token in nats, or else the largest margin
    has_too_many_ties: bool  # more near-ties than rounding explains

    @property
    def differs(self) -> bool:
        return self.first is not None or self.has_too_many_ties

    @property
    def reason(self) -> str:
        """Description of the difference; empty if the answer does not differ."""
        if self.first is not None:
            return f"token {self.first} is {self.margin:.2g} nats from the choice"
        return f"{self.near_ties} near-ties are more than rounding explains" if self.has_too_many_ties else ""


def tolerance_of(numerics: Numerics) -> float:
    """Returns the nats that count as rounding, before temperature."""
    is_rounded = numerics.quantization is not None or numerics.cache_dtype != "auto"
    is_exact = numerics.batch_invariant or (numerics.dtype == "float32" and not is_rounded)
    return EXACT_TOLERANCE if is_exact else ROUNDED_TOLERANCE


def judged(margins: Sequence[float], sampling: Sampling, tolerance: float) -> AuditVerdict:
    """Returns the verdict on an answer.

    Args:
        margins: margin of each token in nats; see outrider/decoding/margins.py.
        sampling: settings of the answer; a temperature below 1 enlarges rounding errors.
        tolerance: nats that count as rounding, before temperature.
    """
    most = tolerance / (sampling.temperature or 1.0)
    wrong = [place for place, margin in enumerate(margins) if margin > most]
    near_ties = sum(0.0 < margin <= most for margin in margins)
    expected = TIES_PER_NAT * most * len(margins)
    return AuditVerdict(
        len(margins),
        near_ties,
        len(wrong),
        wrong[0] if wrong else None,
        margins[wrong[0]] if wrong else max(margins, default=0.0),
        at_least(near_ties, expected) < FALSE_ALARM,
    )
