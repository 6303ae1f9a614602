"""What is told of a token's probability. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one position."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first
