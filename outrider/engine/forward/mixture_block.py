"""Mixtures of experts beside recurrent states: a token has the same bits in any company.

transformers multiplies the rows of a router, and of an expert, by functions of torch. Some processors add up
three rows in another order than four. A sigmoid of torch rounds the last numbers of a tensor, which fill no
vector, in another way than the numbers before them. So a token's bits would depend on how many tokens are
computed with it, and so would every recurrent state after it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.forward.experts import ExpertRouter, SingleExperts, products_of
from outrider.engine.forward.layer_operations import LayerOperations
from outrider.engine.models.architecture import Mixture

# Routers of models with layers of Gated DeltaNet, by the names that transformers gives the blocks' classes.
MIXTURES = {
    "Qwen3NextSparseMoeBlock": Mixture(normalized="norm_topk_prob"),
    "Qwen3_5MoeSparseMoeBlock": Mixture(),
}


class MixtureBlock(nn.Module):
    """Experts that tokens choose, and an expert that all tokens share, in place of transformers' block."""

    def __init__(self, theirs: Any, mixture: Mixture, operations: LayerOperations) -> None:
        super().__init__()
        self.shared_expert, self.shared_expert_gate = theirs.shared_expert, theirs.shared_expert_gate
        self.experts = SingleExperts(products_of(theirs.experts), None, operations, None, 1)
        self._route = ExpertRouter(mixture, theirs, operations)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns states [1, num_tokens, hidden_size] of as many."""
        rows = hidden_states.flatten(0, 1)
        shared = self.shared_expert(rows) / (1 + torch.exp(-self.shared_expert_gate(rows)))
        return self.experts.multiply(rows, *self._route(rows), shared).view_as(hidden_states)


def use_mixture_blocks(model: nn.Module, operations: LayerOperations) -> None:
    """Replaces the blocks of MIXTURES, in place, for inference on a CPU."""
    # The list holds no block: its weights are freed as soon as they are packed.
    kinds = [(name, type(module).__name__) for name, module in model.named_modules()]
    for name, kind in kinds:
        if kind in MIXTURES:
            theirs = model.get_submodule(name)
            model.set_submodule(name, MixtureBlock(theirs, MIXTURES[kind], operations))
