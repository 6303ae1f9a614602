"""Operations of a decoder layer between its matrix products, by Triton kernels."""

import torch
from torch import Tensor

from outrider.engine.forward.attention import Paged
from outrider.engine.forward.layer_operations import Heads, Norm, PlainOperations, Routing
from outrider.engine.kernels import experts, layer

# Compute capabilities of GPUs on which the kernel that sums the ranks' parts has passed its tests: none yet.
SUMS_ON: frozenset[tuple[int, int]] = frozenset()


class FusedOperations(PlainOperations):
    """Implements the operations by Triton kernels; operations without a kernel run in torch."""

    def __init__(self, capability: tuple[int, int]) -> None:
        """capability: compute capability of the GPU."""
        self._sums_ranks = capability in SUMS_ON

    def normed(self, rows: Tensor, norm: Norm) -> Tensor:
        output = torch.empty_like(rows)
        layer.norm(rows[:, None], norm.weight, norm.epsilon, output[:, None])
        return output

    def rotated_and_stored(
        self, product: Tensor, heads: Heads, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> Tensor:
        for part, norm in heads.normed_parts(product):
            layer.norm(part, norm.weight, norm.epsilon, part)
        cache, number = paged.cache, heads.layer
        stored = cache.keys[number], cache.values[number], cache.scales[number]
        return layer.rotate_and_store(product, rotation, paged.slots_of(heads.layer), *stored)

    def gated(self, gate_up: Tensor) -> Tensor:
        return layer.gate(gate_up)

    def routed(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return experts.route(
            logits,
            routing.correction,
            routing.groups or (1, 1),
            routing.slots,
            routing.scores,
            routing.scaling,
            is_normalized=routing.is_normalized,
        )

    def summed_and_normed(self, parts: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if not self._sums_ranks:
            return super().summed_and_normed(parts, norm)
        return layer.sum_and_norm(parts, norm.weight, norm.epsilon)
