"""Mixtures of experts of recurrent models: a token has the same bits whatever is computed with it.

transformers computes routers and experts by functions of torch. On some processors the order of a sum depends
on the number of rows, and the last numbers of a sigmoid are rounded differently. So the bits of a token, and
of every recurrent state after it, would depend on how many tokens are computed together.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from outrider.engine.forward.experts import ExpertRouter, Experts, SquaredExperts, products_of, weighed
from outrider.engine.forward.layer_operations import LayerOperations
from outrider.engine.models.architecture import Mixture
from outrider.engine.models.mixture_blocks import MIXTURE_BLOCKS, NEMOTRON_BLOCK, NEMOTRON_MIXTURE


class MixtureBlock(nn.Module):
    """Experts that tokens choose, and an expert that all tokens share, in place of transformers' block."""

    def __init__(self, theirs: Any, mixture: Mixture, operations: LayerOperations) -> None:
        """theirs: transformers' block, whose experts have been replaced by ours."""
        super().__init__()
        self.shared_expert, self.shared_expert_gate = theirs.shared_expert, theirs.shared_expert_gate
        self.experts: Experts = theirs.experts
        # Every rank has the whole shared expert, so only one rank adds its product to the sum over the ranks.
        self._adds_shared = self.experts.add is None or dist.get_rank() == 0
        self._route = ExpertRouter(mixture, theirs, operations)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the output of the block for states of the same shape, [1, num_tokens, hidden_size]."""
        rows = hidden_states.flatten(0, 1)
        shared = weighed(self.shared_expert(rows), self.shared_expert_gate(rows))
        part = self.experts.multiply(rows, *self._route(rows), shared if self._adds_shared else None)
        total = part if self.experts.add is None else self.experts.add(part)
        return total.view_as(hidden_states)


class MixtureRouter(nn.Module):
    """Router of a mixture that returns what transformers' router returns, apart from the logits."""

    def __init__(self, route: ExpertRouter) -> None:
        super().__init__()
        self._route = route

    def forward(self, hidden_states: Tensor) -> tuple[None, Tensor, Tensor]:
        """Returns None, weights and chosen experts [num_tokens, slots] of [1, num_tokens, hidden_size]."""
        chosen, weights = self._route(hidden_states.flatten(0, 1))
        return None, weights, chosen


def use_mixture_blocks(model: nn.Module, operations: LayerOperations) -> None:
    """Replaces the blocks of recurrent models whose experts are ours, in place, for inference.

    Of Nemotron-H's blocks it replaces router and experts, on a CPU: the rest of a block consists of linear
    layers, and our kernels for a GPU compute experts with a gate only.
    """
    modules: list[tuple[str, Any]] = [*model.named_modules()]
    for name, module in modules:
        if type(module).__name__ == NEMOTRON_BLOCK and module.experts.up_proj.device.type == "cpu":
            module.gate = MixtureRouter(ExpertRouter(NEMOTRON_MIXTURE, module, operations))
            module.experts = SquaredExperts(products_of(module.experts), None, operations, None, 1)
        mixture = MIXTURE_BLOCKS.get(type(module).__name__)
        if mixture is not None and mixture.shared_gate is not None and isinstance(module.experts, Experts):
            model.set_submodule(name, MixtureBlock(module, mixture, operations))
