"""How far a drafter's distribution is from the target's.

Under keyed noise a guess is right with a probability of at least (1 - TV) / (1 + TV), so total variation is
what costs tokens. Its gradient is weak where the two hardly overlap: there the divergence leads.
"""

from typing import NamedTuple

from torch import Tensor

WEIGHT = 2.0  # of total variation, beside a divergence of 1


class Distance(NamedTuple):
    """Means over all positions."""

    divergence: Tensor  # cross-entropy of the drafter under the target: KL(target, drafter) up to a constant
    total_variation: Tensor  # half the absolute difference, which is 1 - the sum of minima

    @property
    def loss(self) -> Tensor:
        return self.divergence + WEIGHT * self.total_variation


def distance(target_probs: Tensor, logits: Tensor) -> Distance:
    """target_probs and the drafter's logits float32 [..., vocab_size]"""
    log_probs = logits.log_softmax(-1)
    divergence = -(target_probs * log_probs).sum(-1).mean()
    return Distance(divergence, 0.5 * (target_probs - log_probs.exp()).abs().sum(-1).mean())
