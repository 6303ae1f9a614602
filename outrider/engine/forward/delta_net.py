"""Gated DeltaNet (Yang et al. 2024): the recurrent layer of Qwen3-Next and Qwen 3.5.

A state is a matrix for each head. Each token decays the state and reads the value stored under its key. A
fraction of the difference to the token's own value is then added there. Before that, queries, keys and values
pass through a short causal convolution.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus

from outrider.engine.cache.recurrent_states import LayerStates, StateShape
from outrider.engine.forward.recurrent_layer import RecurrentLayer
from outrider.engine.inputs.state_program import StateProgram
from outrider.engine.parallel.sums import gathered

KINDS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
EPSILON = 1e-6  # added to the squared length of queries and keys, as transformers does


class DeltaNet(RecurrentLayer):
    """Gated DeltaNet layer. Its groups are key heads, and a head's matrix is [key_dim, value_dim]."""

    def __init__(self, theirs: Any) -> None:
        key_heads, heads = theirs.num_k_heads, theirs.num_v_heads
        shape = StateShape(
            (key_heads, heads // key_heads, theirs.head_k_dim, theirs.head_v_dim),
            (theirs.conv_kernel_size - 1, theirs.conv_dim),
            theirs.conv_dim + 2 * heads,
        )
        super().__init__(theirs, shape)
        self._key_dim: int = theirs.key_dim

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        theirs, count = self.theirs, hidden_states.shape[1]
        if hasattr(theirs, "in_proj_qkvz"):
            mixed, gate = theirs.in_proj_qkvz(hidden_states), theirs.in_proj_ba(hidden_states)
            *mixed, gate, beta, decay = theirs.fix_query_key_value_ordering(mixed, gate)
            parts = [*mixed, beta, decay]
        else:
            names = ("in_proj_qkv", "in_proj_b", "in_proj_a")
            parts = [getattr(theirs, name)(hidden_states) for name in names]
            gate = theirs.in_proj_z(hidden_states)
        records = torch.cat([part.reshape(count, -1) for part in parts], 1)
        return records, gate.reshape(count, theirs.num_v_heads, theirs.head_v_dim)

    def _step(self, record: Tensor, state: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key_heads, repeats, key_dim, value_dim = self.shape.state
        taken, gates = record.tensor_split([self.shape.tail[1]])
        mixed, tail = self._convolved(taken, tail)
        of_keys, values = mixed.tensor_split([2 * self._key_dim])
        normed = of_keys.view(2, key_heads, 1, key_dim, 1)
        normed = normed * torch.rsqrt((normed * normed).sum(3, keepdim=True) + EPSILON)
        query, key = normed
        beta, decay = gates.view(2, key_heads, repeats, 1)
        decay = torch.exp(self._slope * softplus(decay + self._shift))
        state = state * decay[..., None]
        held = (state * key).sum(2)
        beta = torch.sigmoid(beta.to(self._dtype)).float()
        state = state + key * ((values.view(held.shape) - held) * beta).unsqueeze(2)
        output = (state * query).sum(2) * key_dim**-0.5
        return state, tail, output.view(-1, value_dim)

    def _advance(self, program: StateProgram, records: Tensor, output: Tensor, memory: LayerStates) -> None:
        from outrider.engine.kernels.delta_net import advance

        advance(program, records, output, memory, self._taps, (self._slope.flatten(), self._shift.flatten()))

    def _normed(self, output: Tensor, gate: Tensor) -> Tensor:
        return self.theirs.norm(output.flatten(0, 1), gate.flatten(0, 1))  # type: ignore[no-any-return]


def share_delta_nets(model: nn.Module) -> None:
    """Reduces Gated DeltaNet layers to the heads of this rank, in place: states, convolution and gates.

    Their projections are divided among the ranks already. Value heads stay with the key head that they read.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for module in model.modules():
        if type(module).__name__ in KINDS:
            _share(module, rank, ranks)


def _share(theirs: Any, rank: int, ranks: int) -> None:
    own = channels_of(theirs, rank, ranks)
    joined = getattr(theirs, "in_proj_qkv", None)
    if isinstance(joined, nn.Linear):  # its share was cut regardless of where queries, keys and values end
        joined.weight = _without_gradient(gathered(joined.weight.detach()).flatten(0, 1)[own])
    theirs.conv1d.weight = _without_gradient(theirs.conv1d.weight[own])
    for name in ("A_log", "dt_bias"):
        setattr(theirs, name, _without_gradient(getattr(theirs, name).chunk(ranks)[rank].clone()))
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(theirs, name, getattr(theirs, name) // ranks)


def channels_of(theirs: Any, rank: int, ranks: int) -> Tensor:
    """Returns a rank's indices in concatenated queries, keys and values: int64 [channels of a rank]."""
    widths = (theirs.key_dim, theirs.key_dim, theirs.value_dim)
    parts = torch.arange(theirs.conv_dim).split_with_sizes(widths)
    return torch.cat([part.chunk(ranks)[rank] for part in parts])


def _without_gradient(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
