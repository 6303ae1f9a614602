"""What drafting should gain: expected tokens per round. Torch-free.

Acceptance rates are per position, given that the position was reached. The formulas take positions as
independent. Measured rounds are not quite, so these are predictions, not bounds.
"""

from collections.abc import Sequence
from math import prod


def expected_tokens(acceptance_rate: float, depth: int) -> float:
    """Tokens per round, the target's own included, of a chain of ``depth`` tokens with one acceptance rate.

    (1 - a^(K + 1)) / (1 - a), and K + 1 at a = 1. Source: Leviathan et al., "Fast inference from transformers
    via speculative decoding", 2023, equation 1.

    Raises:
        ValueError: the rate is not within [0, 1] or the depth is negative.
    """
    if depth < 0:
        raise ValueError(f"depth={depth} must be at least 0")
    return expected_tokens_by_position([acceptance_rate] * depth)


def expected_tokens_by_position(acceptance_rates: Sequence[float]) -> float:
    """Tokens per round, the target's own included, of a chain with a rate per position: 1 + a + a b + ...

    Raises:
        ValueError: a rate is not within [0, 1].
    """
    for rate in acceptance_rates:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"acceptance rate {rate} must be within [0, 1]")
    return 1.0 + sum(prod(acceptance_rates[:reached]) for reached in range(1, len(acceptance_rates) + 1))
