"""Distance of a drafter's distribution from the target's.

Under keyed noise a guess is correct with a probability of at least (1 - TV) / (1 + TV), so total variation
costs tokens. Its gradient is weak if the distributions hardly overlap: then the divergence leads.
"""

from typing import NamedTuple

from torch import Tensor

WEIGHT = 2.0  # weight of total variation, to a divergence of weight 1


class Distance(NamedTuple):
    """Distances [...] of guesses."""

    divergence: Tensor  # cross-entropy of the drafter under the target: KL(target, drafter) up to a constant
    total_variation: Tensor  # half the absolute difference, which is 1 - the sum of minima

    @property
    def loss(self) -> Tensor:
        return self.divergence + WEIGHT * self.total_variation


def distance(target_probs: Tensor, logits: Tensor) -> Distance:
    """Returns the distances. target_probs and the drafter's logits: float32 [..., vocab_size]."""
    log_probs = logits.log_softmax(-1)
    divergence = -(target_probs * log_probs).sum(-1)
    return Distance(divergence, 0.5 * (target_probs - log_probs.exp()).abs().sum(-1))
