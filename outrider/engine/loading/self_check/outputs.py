"""Tolerated differences between our outputs and transformers': what rounding explains."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.loading.self_check.script import Row

FACTOR = 4.0  # tolerated difference of ours, as a multiple of the difference of transformers' two runs
# Multiple if ours sums float32 products in another order than transformers' two runs, which share an order.
# An intact model of 8 layers reached 3.6 in one process, and over 4 on two ranks with AVX2.
FACTOR_REORDERED = 8.0
ROUNDINGS = 2.0  # units of the type's precision, relative to the logits' size, that are always tolerated


@dataclass(frozen=True)
class Difference:
    """Difference between our outputs and transformers', in rows of one kind."""

    kind: str
    found: float  # largest difference of the median row
    allowed: float

    def __str__(self) -> str:
        return f"{self.kind} (by {self.found:.2g}, where rounding explains {self.allowed:.2g})"


@dataclass(frozen=True)
class Outputs:
    """Outputs of one layer, or the logits; all [num_rows, size]."""

    ours: Tensor
    whole: Tensor  # outputs of transformers in one piece
    again: Tensor  # outputs of transformers by the other attention
    precision: float  # precision of the narrowest type that computed them
    are_reordered: bool = False  # whether ours sums products in another order than ``whole`` and ``again``


def differences(rows: list[Row], outputs: Outputs) -> list[Difference]:
    """Returns the kinds of rows in which ours differs from ``whole`` by more than rounding explains."""
    found = _largest(outputs.ours, outputs.whole)
    rounding = _largest(outputs.again, outputs.whole)
    of_kind = {row.kind: torch.tensor([other.kind == row.kind for other in rows]) for row in rows}
    middle = max(float(rounding[which].median()) for which in of_kind.values())
    # In a narrow type the rounding of products outweighs the effect of the order of a sum.
    is_wide = outputs.precision <= torch.finfo(torch.float32).eps
    factor = FACTOR_REORDERED if outputs.are_reordered and is_wide else FACTOR
    allowed = factor * middle + ROUNDINGS * outputs.precision * _size(outputs.whole)
    every = [Difference(kind, float(found[which].median()), allowed) for kind, which in of_kind.items()]
    return [difference for difference in every if not difference.found <= allowed]


def is_rounding(whole: Tensor, again: Tensor, precision: float) -> bool:
    """Whether rounding could explain the whole difference between transformers' own logits."""
    return bool(_largest(again, whole).median() <= precision**0.5 * _size(whole))


def is_finite(logits: Tensor) -> bool:
    """Whether no logit is NaN or plus infinity; a model may exclude tokens by minus infinity."""
    return not bool((logits.isnan() | (logits == torch.inf)).any())


def _size(outputs: Tensor) -> float:
    """Returns the distance from the median to the maximum, on which excluded tokens have no effect."""
    outputs = outputs.float()
    return float((outputs.amax(-1) - outputs.median(-1).values).median())


def _largest(one: Tensor, other: Tensor) -> Tensor:
    """Returns the largest difference of each row; equal infinities do not differ."""
    one, other = one.float(), other.float()
    return (one - other).abs().masked_fill(one == other, 0.0).amax(-1).cpu()
