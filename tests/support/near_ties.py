"""How close a choice was: rounding may turn a near-tie, and nothing else."""

from torch import Tensor

from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.row import Row
from outrider.decoding.sampling import process


def margin(logits: Tensor, row: Row) -> float:
    """How far apart the two largest perturbed logits of [1, vocab_size] are."""
    first, second = gumbel_max(process(logits, [row]), [row], 2)[1][0]
    return float(first - second)
