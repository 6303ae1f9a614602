"""Operations of a Llama-family decoder layer between its matrix products, in torch.

On a GPU each operation is a single kernel instead: outrider.engine.forward.cuda_operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.engine.forward.attention import Paged, store
from outrider.engine.models.architecture import Scores
from outrider.engine.parallel.sums import summed


class Norm:
    """Weight and epsilon of root mean square normalization (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """weight: [..., size]"""
        self.size = weight.shape[-1]
        self.epsilon = epsilon
        self.weight = weight.detach()
        self.scaled = self.weight.float() * self.size**0.5
        self.least = torch.tensor((self.size * epsilon) ** 0.5)


@dataclass(frozen=True)
class Heads:
    """Shape of a layer's joint product of queries, keys and values."""

    layer: int
    queries: int
    kv: int  # number of key heads, and also of value heads
    dim: int
    norms: tuple[Norm, ...]  # norms of consecutive heads from the first on, each with weight [groups, size]

    def normed_parts(self, product: Tensor) -> Iterator[tuple[Tensor, Norm]]:
        """Yields views [num_tokens, groups, size] of a product [num_tokens, heads, dim], and their norms."""
        first = 0
        for norm in self.norms:
            heads = norm.weight.numel() // self.dim
            yield product[:, first : first + heads].view(len(product), -1, norm.size), norm
            first += heads


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts."""

    scores: Scores
    slots: int  # experts that a token chooses
    correction: Tensor | None  # float32 [experts] bias of scores that affects the choice but not the weights
    groups: tuple[int, int] | None  # groups of neighbouring experts, and groups to choose from
    is_normalized: bool  # whether the weights of the chosen experts are normalized to sum to ``scaling``
    scaling: float  # factor by which the weights are multiplied


class LayerOperations(Protocol):
    """Operations whose results equal those of transformers up to rounding."""

    def normed(self, rows: Tensor, norm: Norm) -> Tensor:
        """Returns the normed rows; rows and result are [num_tokens, size], of the weight's dtype."""

    def rotated_and_stored(
        self, product: Tensor, heads: Heads, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> Tensor:
        """Rotates queries and keys, and stores keys and values in the cache.

        Rotary embedding (Su et al. 2021) pairs the halves of a head.

        Args:
            product: [num_tokens, query heads + key heads + value heads, head_dim]; may be overwritten.
            rotation: cosines, and sines with a negated first half, [num_tokens, 1, rotated dimensions].

        Returns:
            queries [num_tokens, heads, head_dim]
        """

    def gated(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up [num_tokens, size] of gate and up [num_tokens, 2 * size]."""

    def routed(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Chooses experts by logits, float32 [num_tokens, experts]; of equal scores the first is the highest.

        Returns:
            chosen experts, int64, and their weights, float32, [num_tokens, slots] each, by descending score
        """

    def summed_and_normed(self, parts: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns the sum of the parts as sums.summed adds them, and the sum's norm: [num_tokens, size] each.

        parts: [ranks, num_tokens, size].
        """
        states = summed(parts)
        return states, self.normed(states, norm)


class PlainOperations(LayerOperations):
    """Implements the operations in torch, for a CPU, and for a GPU without our kernels."""

    def normed(self, rows: Tensor, norm: Norm) -> Tensor:
        """Divides by the vector norm, which torch computes in a single operation.

        sqrt(mean(x^2) + epsilon) is hypot(norm(x), sqrt(size * epsilon)) / sqrt(size).
        """
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        length = torch.hypot(length, norm.least)
        if rows.dtype == torch.float32:
            return rows.div(length).mul_(norm.scaled)
        return rows.float().div_(length).mul_(norm.scaled).to(rows.dtype)

    def rotated_and_stored(
        self, product: Tensor, heads: Heads, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> Tensor:
        turned = heads.queries + heads.kv
        query_key, value = product[:, :turned], product[:, turned:]
        for part, norm in heads.normed_parts(product):
            part.copy_(self.normed(part, norm))
        query_key = rotated(query_key, *rotation)
        store(paged, heads.layer, query_key[:, heads.queries :], value)
        return query_key[:, : heads.queries]

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate).mul_(up)

    def routed(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Computes scores in float64; rounded to float32 they do not depend on torch's vectorization."""
        wide = logits.double()
        if routing.scores == "sigmoid":
            scores = wide.sigmoid().float()
        else:
            scores = wide.softmax(-1).float() if routing.scores == "softmax" else logits
        ranked = scores if routing.correction is None else scores + routing.correction
        if routing.groups is not None and routing.groups[0] > routing.groups[1]:
            ranked = _in_best_groups(ranked, *routing.groups)
        chosen = _best(ranked, routing.slots)
        weights = scores.gather(-1, chosen)
        if routing.scores == "softmax of chosen":
            weights = weights.double().softmax(-1).float()
        elif routing.is_normalized:
            weights = weights / torch.stack(weights.unbind(-1)).sum(0)[:, None]
        return chosen, weights * routing.scaling


def _in_best_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """Returns scores [num_tokens, experts], -inf outside the ``kept`` best groups.

    Groups are ranked by the sum of their two highest scores.
    """
    grouped = scores.view(len(scores), groups, -1)
    best = _best(grouped.topk(2).values.sum(-1), kept)
    is_left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(is_left_out[..., None], float("-inf")).view_as(scores)


def _best(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the highest scores, in descending order; equal scores keep their order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns heads [num_tokens, heads, head_dim] whose first dimensions are rotated by their positions."""
    turning = cosines.shape[-1]
    if turning < heads.shape[-1]:
        first = rotated(heads[..., :turning], cosines, sines)
        return torch.cat([first, heads[..., turning:]], -1)
    return torch.addcmul(heads * cosines, heads.roll(turning // 2, -1), sines)
