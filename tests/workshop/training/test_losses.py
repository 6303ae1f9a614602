"""How far a drafter's distribution is from the target's."""

import torch

from workshop.training.losses import distance


def test_distance_is_least_where_draft_and_target_agree() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]]])
    probs, other = logits.softmax(-1), logits.flip(-1)
    same, different = distance(probs, logits), distance(probs, other)
    torch.testing.assert_close(same.total_variation, torch.zeros(1, 2))
    minima = torch.minimum(probs, other.softmax(-1)).sum(-1)
    torch.testing.assert_close(different.total_variation, 1 - minima)
    assert (same.divergence < different.divergence).all()
    assert (same.loss < different.loss).all()
