"""Operations of a Llama-family decoder layer between its matrix products, by torch.

On a GPU each of them is one kernel instead: outrider.engine.forward.cuda_operations.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.engine.forward.attention import Paged, store
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
    """Shape of one layer's product of queries, keys and values."""

    layer: int
    queries: int
    kv: int  # heads of keys, and as many of values
    dim: int
    norm: Norm | None  # norm of each query and key head; None: the model has none


class LayerOperations(Protocol):
    """Operations whose results are within rounding of transformers'."""

    def normed(self, rows: Tensor, norm: Norm) -> Tensor:
        """Returns the normed rows; both are [num_tokens, size], of the weight's dtype."""

    def rotated_and_stored(
        self, product: Tensor, heads: Heads, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> Tensor:
        """Rotates queries and keys, and stores keys and values in the cache.

        Rotary embedding is that of Su et al. 2021, with the halves of a head as its pairs.

        Args:
            product: [num_tokens, query heads, then key and value heads, head_dim], which may be overwritten.
            rotation: cosines, and sines with a negated first half, [num_tokens, 1, head_dim].

        Returns:
            queries [num_tokens, heads, head_dim]
        """

    def gated(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up [num_tokens, size] of gate and up [num_tokens, 2 * size]."""

    def summed_and_normed(self, parts: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns the sum of the parts as sums.summed adds them, and the sum's norm: [num_tokens, size] each.

        parts: [ranks, num_tokens, size].
        """
        states = summed(parts)
        return states, self.normed(states, norm)


class PlainOperations(LayerOperations):
    """Implements the operations by torch, for a CPU, and for a GPU without kernels of ours."""

    def normed(self, rows: Tensor, norm: Norm) -> Tensor:
        """Divides by the vector norm, which is one operation.

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
        if heads.norm is not None:
            query_key = self.normed(query_key, heads.norm)
        query_key = rotated(query_key, *rotation)
        store(paged, heads.layer, query_key[:, heads.queries :], value)
        return query_key[:, : heads.queries]

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate).mul_(up)


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns heads [num_tokens, heads, head_dim] rotated by their positions."""
    return torch.addcmul(heads * cosines, heads.roll(heads.shape[-1] // 2, -1), sines)
