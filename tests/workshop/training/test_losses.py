"""How far a drafter's distribution is from the target's."""

import pytest
import torch

from workshop.training.losses import distance


def test_distance_is_least_where_draft_and_target_agree() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]]])
    probs, other = logits.softmax(-1), logits.flip(-1)
    same, different = distance(probs, logits), distance(probs, other)
    assert same.total_variation.item() == pytest.approx(0, abs=1e-6)
    minima = torch.minimum(probs, other.softmax(-1)).sum(-1).mean().item()
    assert different.total_variation.item() == pytest.approx(1 - minima, abs=1e-6)
    assert same.divergence < different.divergence
    assert same.loss < different.loss
