"""Mixtures of experts beside recurrent states: a token has the same bits in any company.

transformers multiplies the rows of a router, and of an expert, by functions of torch. Some processors add up
three rows in another order than four, and round the last numbers of a sigmoid in another way. So a token's
bits would depend on how many tokens are computed with it, and so would every recurrent state after it.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from outrider.engine.forward.experts import ExpertRouter, Experts, weighed
from outrider.engine.forward.layer_operations import LayerOperations
from outrider.engine.models.architecture import Mixture
from outrider.engine.models.mixture_blocks import MIXTURE_BLOCKS


class MixtureBlock(nn.Module):
    """Experts that tokens choose, and an expert that all tokens share, in place of transformers' block."""

    def __init__(self, theirs: Any, mixture: Mixture, operations: LayerOperations) -> None:
        """theirs: transformers' block, whose experts are ours already."""
        super().__init__()
        self.shared_expert, self.shared_expert_gate = theirs.shared_expert, theirs.shared_expert_gate
        self.experts: Experts = theirs.experts
        self._adds_shared = self.experts.add is None or dist.get_rank() == 0  # every rank has it whole
        self._route = ExpertRouter(mixture, theirs, operations)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns states [1, num_tokens, hidden_size] of as many."""
        rows = hidden_states.flatten(0, 1)
        shared = weighed(self.shared_expert(rows), self.shared_expert_gate(rows))
        part = self.experts.multiply(rows, *self._route(rows), shared if self._adds_shared else None)
        total = part if self.experts.add is None else self.experts.add(part)
        return total.view_as(hidden_states)


def use_mixture_blocks(model: nn.Module, operations: LayerOperations) -> None:
    """Replaces blocks beside recurrent states whose experts are ours, in place, for inference."""
    for name, module in [*model.named_modules()]:
        mixture = MIXTURE_BLOCKS.get(type(module).__name__)
        if mixture is not None and mixture.shared_gate is not None and isinstance(module.experts, Experts):
            model.set_submodule(name, MixtureBlock(module, mixture, operations))
