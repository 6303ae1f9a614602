"""Layer with a recurrent state of fixed size in place of a KV cache.

A kind of layer says what a token's record is, and how a record advances a state. This file says when: it
replays records, follows the nodes of a tree, and stores the states that later passes need.

transformers computes prompts in chunks, and single tokens by another formula, which rounds differently. Here
every token is computed by the formula for single tokens, in float32, by operations of fixed shapes. That
holds for prompts cut anywhere, Drafts, plain decoding and replayed tokens. So a state has the same bits
however it was computed.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.engine.cache.recurrent_states import LayerStates, StateShape
from outrider.engine.forward.attention import Paged, Probe
from outrider.engine.forward.batch import Batch
from outrider.engine.held_state import RECORDS
from outrider.engine.inputs.recurrence import Recurrence
from outrider.engine.inputs.state_program import StateProgram


class RecurrentLayer(nn.Module):
    """Recurrent layer in place of transformers' module, which is kept for the self-check.

    Both share submodules and parameters, which keep the names that checkpoints, plans and ranks use.
    """

    theirs: Any

    def __init__(self, theirs: Any, shape: StateShape) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = theirs._modules, theirs._parameters, theirs._buffers
        vars(self)["theirs"] = theirs  # not as a submodule, whose parameters would have further names
        self.layer: int = theirs.layer_idx
        self.shape = shape
        self._dtype: torch.dtype = theirs.conv1d.weight.dtype

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns contiguous records and the gates of the output.

        Args:
            hidden_states: [1, num_tokens, hidden_size]

        Returns:
            Records [num_tokens, record], which begin with the inputs of the convolution, and gates
            [num_tokens, heads, dim].
        """
        raise NotImplementedError

    def _step(self, record: Tensor, state: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes a token.

        Args:
            record: [record]
            state: StateShape.state; all arguments are float32
            tail: [tokens before, numbers] earlier inputs of the convolution

        Returns:
            The next state, the next tail, and the output [heads, dim].
        """
        raise NotImplementedError

    def _advance(self, program: StateProgram, records: Tensor, output: Tensor, memory: LayerStates) -> None:
        """Computes the tokens of all sequences on a GPU, with the arguments of ``_compute``."""
        raise NotImplementedError

    def _normed(self, output: Tensor, gate: Tensor) -> Tensor:
        """Returns the gated norm of the output; its numbers are in the order of the arguments.

        output, gate: [num_tokens, heads, dim]
        """
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, outrider: Paged | Probe | None = None, **others: Any) -> Tensor:
        """Returns the output of the layer for states of the same shape, [1, num_tokens, hidden_size]."""
        theirs = self.theirs
        if outrider is None:
            return theirs(hidden_states, **others)  # type: ignore[no-any-return]
        records, gate = self._projected(hidden_states)
        output = gate.new_zeros(gate.shape)
        if isinstance(outrider, Probe):
            outrider.states[self.layer] = self.shape
        else:
            assert outrider.cache.states is not None
            self._compute_all(outrider.batch, records, output, outrider.cache.states.layers[self.layer])
        return theirs.out_proj(self._normed(output, gate).view(1, len(output), -1))  # type: ignore[no-any-return]

    def _compute_all(self, batch: Batch, records: Tensor, output: Tensor, memory: LayerStates) -> None:
        """Computes the tokens of all sequences, with the arguments of ``_compute``."""
        if batch.state_program is not None:
            self._advance(batch.state_program, records, output, memory)
            return
        for recurrence in batch.recurrences:
            self._compute(recurrence, records, output, memory)

    def _compute(self, recurrence: Recurrence, records: Tensor, output: Tensor, memory: LayerStates) -> None:
        """Computes the tokens of a sequence; writes rows of output, records and states."""
        use, slot = recurrence.use, recurrence.use.slot
        ring, fed = memory.records[slot], records[recurrence.rows]
        places = [ring[part] for part in recurrence.ring(use.first, recurrence.replayed)]
        steps = torch.cat([*places, fed]).float()
        if use.read is None:
            begun = (
                fed.new_zeros(self.shape.state, dtype=torch.float32),
                fed.new_zeros(self.shape.tail).float(),
            )
        else:
            begun = memory.states[slot, use.read], memory.tails[slot, use.read].float()
        state, tail = begun
        nodes: list[tuple[Tensor, Tensor]] = []
        first_row, kept_after = recurrence.rows.start - recurrence.replayed, recurrence.kept_after
        for step, parent in enumerate(recurrence.parents):
            if parent != step - 1:
                state, tail = begun if parent < 0 else nodes[parent]
            state, tail, found = self._step(steps[step], state, tail)
            if recurrence.chain < len(recurrence.parents):
                nodes.append((state, tail))
            if step >= recurrence.replayed:
                output[first_row + step] = found
            if step == recurrence.stored_after:
                stored = state, tail
            if (end := kept_after.get(step)) is not None:
                memory.kept_states[end] = state
                memory.kept_tails[end] = tail
        if use.write is not None:
            memory.states[slot, use.write] = stored[0]
            memory.tails[slot, use.write] = stored[1]
        kept = fed[-RECORDS:]
        end = use.first + recurrence.replayed + len(fed)
        row = 0
        for part in recurrence.ring(end - len(kept), len(kept)):
            count = part.stop - part.start
            ring[part] = kept[row : row + count]
            row += count

    def _convolved(self, taken: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the silu of a token's convolution, float32 [numbers], and the next tail.

        Args:
            taken: [numbers] the token's input of the convolution
            tail: [tokens before, numbers] earlier inputs
        """
        window = torch.cat([tail, taken[None]])
        total = (window * self._taps).sum(0)
        if self._bias is not None:
            total = total + self._bias
        # Rounded to the model's type, as transformers rounds here.
        return silu(total.to(self._dtype)).float(), window[1:]

    @cached_property
    def _taps(self) -> Tensor:
        """Weights of the convolution, [tokens, numbers]."""
        return self.theirs.conv1d.weight.float()[:, 0].t().contiguous()  # type: ignore[no-any-return]

    @cached_property
    def _bias(self) -> Tensor | None:
        """Biases of the convolution, [numbers]; None: it has none."""
        bias: Tensor | None = self.theirs.conv1d.bias
        return None if bias is None else bias.float()

    @cached_property
    def _slope(self) -> Tensor:
        """Factor of a time step that gives the logarithm of the decay, [groups, heads of each, 1]."""
        return -self.theirs.A_log.float().exp().view(*self.shape.state[:2], 1)  # type: ignore[no-any-return]

    @cached_property
    def _shift(self) -> Tensor:
        """Bias of a time step, [groups, heads of each, 1]."""
        return self.theirs.dt_bias.float().view(*self.shape.state[:2], 1)  # type: ignore[no-any-return]


def keeps_states(model: Any) -> bool:
    """Whether layers of a model keep recurrent states."""
    return any(isinstance(module, RecurrentLayer) for module in model.modules())
