"""Gated DeltaNet (Yang et al. 2024): a layer with a recurrent state of fixed size in place of a KV cache.

A state is a matrix for each head. Each token decays the state and reads the value stored under its key. A
fraction of the difference to the token's own value is then added there. Before that, queries, keys and values
pass through a short causal convolution.

transformers computes prompts in chunks of 64 tokens, and single tokens by another formula, which rounds
differently. Here every token is computed by the formula for single tokens, in float32, by operations of fixed
shapes. That holds for prompts cut anywhere, Drafts, plain decoding and replayed tokens. So a state has the
same bits however it was computed.
"""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from outrider.engine.cache.recurrent_states import RecurrentStates, StateShape
from outrider.engine.forward.attention import Paged, Probe
from outrider.engine.forward.batch import Batch
from outrider.engine.held_state import RECORDS
from outrider.engine.inputs.recurrence import Recurrence
from outrider.engine.parallel.sums import gathered

KINDS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
EPSILON = 1e-6  # added to the squared length of queries and keys, as transformers does


class DeltaNet(nn.Module):
    """Gated DeltaNet layer in place of transformers' module, which is kept for the self-check.

    Both share submodules and parameters, which keep the names that checkpoints, plans and ranks use.
    """

    theirs: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = theirs._modules, theirs._parameters, theirs._buffers
        vars(self)["theirs"] = theirs  # not as a submodule, whose parameters would have further names
        self.layer: int = theirs.layer_idx
        key_heads, heads = theirs.num_k_heads, theirs.num_v_heads
        self._key_dim: int = theirs.key_dim
        self._dtype: torch.dtype = theirs.conv1d.weight.dtype
        self.shape = StateShape(
            (key_heads, heads // key_heads, theirs.head_k_dim, theirs.head_v_dim),
            (theirs.conv_kernel_size - 1, theirs.conv_dim),
            theirs.conv_dim + 2 * heads,
        )

    def forward(self, hidden_states: Tensor, outrider: Paged | Probe | None = None, **others: Any) -> Tensor:
        """Returns the output of the layer for states of the same shape, [1, num_tokens, hidden_size]."""
        theirs = self.theirs
        if outrider is None:
            return theirs(hidden_states, **others)  # type: ignore[no-any-return]
        records, gate = self._projected(hidden_states)
        output = torch.zeros_like(gate)
        if isinstance(outrider, Probe):
            outrider.states[self.layer] = self.shape
        else:
            assert outrider.cache.states is not None
            self._compute_all(outrider.batch, records, output, outrider.cache.states)
        normed = theirs.norm(output.flatten(0, 1), gate.flatten(0, 1))
        return theirs.out_proj(normed.view(1, len(output), -1))  # type: ignore[no-any-return]

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns records [num_tokens, record], and gates [num_tokens, heads, value_dim]."""
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

    def _compute_all(self, batch: Batch, records: Tensor, output: Tensor, states: RecurrentStates) -> None:
        """Computes the tokens of all sequences, with the arguments of ``_compute``."""
        if batch.state_program is None:
            for recurrence in batch.recurrences:
                self._compute(recurrence, records, output, states)
            return
        from outrider.engine.kernels.delta_net import advance

        layer, kept = self.layer, states.kept
        advance(
            batch.state_program,
            records,
            output,
            states.states[layer],
            states.tails[layer],
            states.records[layer],
            (kept.states[layer], kept.tails[layer]),
            self._taps,
            (self._slope.flatten(), self._shift.flatten()),
        )

    def _compute(
        self, recurrence: Recurrence, records: Tensor, output: Tensor, states: RecurrentStates
    ) -> None:
        """Computes the tokens of a sequence; writes rows of output, records and a state."""
        use, slot = recurrence.use, recurrence.use.slot
        ring, fed = states.records[self.layer][slot], records[recurrence.rows]
        places = [ring[part] for part in recurrence.ring(use.first, recurrence.replayed)]
        steps = torch.cat([*places, fed]).float()
        if use.read is None:
            begun = (
                fed.new_zeros(self.shape.heads, dtype=torch.float32),
                fed.new_zeros(self.shape.tail).float(),
            )
        else:
            begun = (
                states.states[self.layer][slot, use.read],
                states.tails[self.layer][slot, use.read].float(),
            )
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
                states.kept.states[self.layer][end] = state
                states.kept.tails[self.layer][end] = tail
        if use.write is not None:
            states.states[self.layer][slot, use.write] = stored[0]
            states.tails[self.layer][slot, use.write] = stored[1]
        kept = fed[-RECORDS:]
        end = use.first + recurrence.replayed + len(fed)
        row = 0
        for part in recurrence.ring(end - len(kept), len(kept)):
            count = part.stop - part.start
            ring[part] = kept[row : row + count]
            row += count

    def _step(self, record: Tensor, state: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes a token.

        Args:
            record: [record]
            state: [key_heads, repeats, key_dim, value_dim]; all arguments are float32
            tail: [tokens before, numbers] earlier inputs of the convolution

        Returns:
            The next state, the next tail, and the output [heads, value_dim].
        """
        key_heads, repeats, key_dim, value_dim = self.shape.heads
        taken, gates = record.tensor_split([self.shape.tail[1]])
        window = torch.cat([tail, taken[None]])
        # Rounded to the model's type, as transformers rounds here.
        mixed = silu((window * self._taps).sum(0).to(self._dtype)).float()
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
        return state, window[1:], output.view(-1, value_dim)

    @cached_property
    def _taps(self) -> Tensor:
        """Weights of the convolution, [tokens, numbers]."""
        return self.theirs.conv1d.weight.float()[:, 0].t().contiguous()  # type: ignore[no-any-return]

    @cached_property
    def _slope(self) -> Tensor:
        return -self.theirs.A_log.float().exp().view(*self.shape.heads[:2], 1)  # type: ignore[no-any-return]

    @cached_property
    def _shift(self) -> Tensor:
        return self.theirs.dt_bias.float().view(*self.shape.heads[:2], 1)  # type: ignore[no-any-return]


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


def use_delta_nets(model: Any) -> bool:
    """Replaces transformers' Gated DeltaNet layers by ours, in place; returns whether the model has any."""
    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            if type(module).__name__ in KINDS and not isinstance(parent, DeltaNet):
                setattr(parent, name, DeltaNet(module))
    return keeps_states(model)


def keeps_states(model: Any) -> bool:
    """Whether layers of a model keep recurrent states."""
    return any(isinstance(module, DeltaNet) for module in model.modules())
