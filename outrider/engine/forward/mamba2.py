"""Mamba-2 (Dao and Gu 2024): the recurrent layer of Nemotron-H and Nemotron 3.

A state is a matrix for each head. Each token decays the state, and adds the outer product of the head's input
and a vector of its group. Another vector of the group reads the state. A time step, which the token chooses
for each head, scales the decay and the input. Before that, the input and both vectors pass through a short
causal convolution.

A record holds the token's inputs of the convolution and its time steps, from which all of this follows.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from outrider.engine.cache.recurrent_states import LayerStates, StateShape
from outrider.engine.forward.recurrent_layer import RecurrentLayer
from outrider.engine.inputs.state_program import StateProgram

KINDS = ("NemotronHMamba2Mixer",)


class Mamba2(RecurrentLayer):
    """Mamba-2 layer. A head's matrix is [state_size, head_dim]."""

    def __init__(self, theirs: Any) -> None:
        groups, heads = theirs.n_groups, theirs.num_heads
        shape = StateShape(
            (groups, heads // groups, theirs.ssm_state_size, theirs.head_dim),
            (theirs.conv_kernel_size - 1, theirs.conv_dim),
            theirs.conv_dim + heads,
        )
        super().__init__(theirs, shape)
        # transformers limits the time steps of prompts, but not those of single tokens. Here all are limited.
        self._limits: tuple[float, float] = theirs.time_step_limit

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        theirs = self.theirs
        projected = theirs.in_proj(hidden_states)[0]
        gate, records = projected.split_with_sizes([theirs.intermediate_size, self.shape.record], 1)
        return records.contiguous(), gate.unflatten(1, (theirs.num_heads, theirs.head_dim))

    def _step(self, record: Tensor, state: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups, repeats, state_size, head_dim = self.shape.state
        taken, time_steps = record.tensor_split([self.shape.tail[1]])
        mixed, tail = self._convolved(taken, tail)
        inputs, of_groups = mixed.tensor_split([groups * repeats * head_dim])
        inputs = inputs.view(groups, repeats, head_dim)
        writing, reading = of_groups.view(2, groups, 1, state_size, 1)
        time_steps = softplus(time_steps.view(groups, repeats, 1) + self._shift).clamp(*self._limits)
        decay = torch.exp(self._slope * time_steps)
        state = state * decay[..., None] + writing * (inputs * time_steps).unsqueeze(2)
        output = (state * reading).sum(2) + inputs * self._skip
        return state, tail, output.view(-1, head_dim)

    def _advance(self, program: StateProgram, records: Tensor, output: Tensor, memory: LayerStates) -> None:
        from outrider.engine.kernels.mamba2 import advance

        of_heads = (self._slope.flatten(), self._shift.flatten(), self._skip.flatten())
        advance(program, records, output, memory, (self._taps, self._bias), of_heads, self._limits)

    def _normed(self, output: Tensor, gate: Tensor) -> Tensor:
        return self.theirs.norm(output.flatten(1), gate.flatten(1))  # type: ignore[no-any-return]

    @cached_property
    def _skip(self) -> Tensor:
        """Factor of a head's input that is added to its output, [groups, heads of each, 1]."""
        return self.theirs.D.float().view(*self.shape.state[:2], 1)  # type: ignore[no-any-return]
