"""Decoders of the Llama family, computed in few operations.

transformers writes a layer as some sixty operations in ten modules. Where a step takes a few milliseconds,
starting them takes longer than their arithmetic, on a CPU and on a GPU. Here the same layer is about twenty
operations, on a GPU ten kernels, and no module but its matrix products:

- queries, keys and values come from one product, gate and up from one, and a product adds the residual;
- queries and keys are rotated together, by cosines and sines that are computed once per step;
- a norm reads its numbers once;
- of the last layer's states only the rows whose logits are wanted are normed.

The result is within rounding of transformers'. The self-check compares the two at load.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.forward.attention import Paged, attended
from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.layer_operations import Heads, LayerOperations, Norm, PlainOperations
from outrider.engine.forward.linear import PackedLinear, Projection
from outrider.engine.kernels.cpu.functions import compiled

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Decoder:
    """A model of the family, in the place of its `forward`. Its linear layers may have been replaced."""

    def __init__(self, model: Any, hidden_layers: Collection[int], operations: LayerOperations) -> None:
        """hidden_layers: whose states are asked for, as transformers numbers them; 0: the embeddings."""
        body = model.model
        self._operations = operations
        self._embedding = body.embed_tokens.weight
        self._layers = [_Layer(layer, operations) for layer in body.layers]
        self._rotary = body.rotary_emb
        self._norm = body.norm  # another module where a part of the model leaves early
        self._usual_norm = _norm_of(body.norm) if hasattr(body.norm, "variance_epsilon") else None
        self._head = _function_of(model.lm_head)
        self._hidden_layers = tuple(number % (1 + len(self._layers)) for number in hidden_layers)

    def __call__(self, paged: Paged) -> tuple[Tensor, Tensor | None]:
        """A step's pass.

        Returns:
            logits [num_logits, vocab_size] and states [num_tokens, num_hidden_layers, hidden_size], None
            where none are asked for.
        """
        batch = paged.batch
        states = self._embedding[batch.token_ids[0]]  # [num_tokens, hidden_size]
        rotation = self._rotation(batch.position_ids[0], states.dtype)
        last = len(self._layers)
        kept = {0: states.clone()} if 0 in self._hidden_layers else {}
        for number, layer in enumerate(self._layers, 1):
            states = layer(states, rotation, paged)
            if number in self._hidden_layers and number < last:
                kept[number] = states.clone()  # a layer adds to the states where they are
        if last in self._hidden_layers:  # the last one's are kept normed
            states = kept[last] = self._normed(states)
            wanted = states[batch.logit_rows]
        else:
            wanted = self._normed(states[batch.logit_rows])
        hidden = [kept[number] for number in self._hidden_layers]
        return self._head(wanted), torch.stack(hidden, dim=1) if hidden else None

    def _normed(self, states: Tensor) -> Tensor:
        if self._usual_norm is None:
            return self._norm(states)  # type: ignore[no-any-return]
        return self._operations.normed(states, self._usual_norm)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of the first half turned: [num_tokens, 1, head_dim] each."""
        angles = positions[:, None].float() * self._rotary.inv_freq
        scale = self._rotary.attention_scaling
        cosines, sines = angles.cos() * scale, angles.sin() * scale
        joined = torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)
        return joined[0][:, None].to(dtype), joined[1][:, None].to(dtype)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, operations: LayerOperations) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._operations = operations
        self._scaling: float = attention.scaling
        # Whose window it is; the self-check shortens it for a while.
        self._windowed = attention.config if type(attention).__name__ == "MistralAttention" else attention
        self._attention_norm = _norm_of(layer.input_layernorm)
        self._query_key_value = _function_of(attention.q_proj.shared.product)
        dim: int = attention.head_dim
        queries, kv, _ = (width // dim for width in attention.q_proj.shared.widths)
        self._heads = Heads(attention.layer_idx, queries, kv, dim, _norm_of_heads(attention, queries, kv))
        self._add_output = _adding(attention.o_proj)
        self._mlp_norm = _norm_of(layer.post_attention_layernorm)
        self._gate_up = _function_of(mlp.gate_proj.shared.product)
        self._add_down = _adding(mlp.down_proj)

    def __call__(self, states: Tensor, rotation: tuple[Tensor, Tensor], paged: Paged) -> Tensor:
        """states and result [num_tokens, hidden_size]; they may be the same memory."""
        operations, heads = self._operations, self._heads
        product = self._query_key_value(operations.normed(states, self._attention_norm))
        product = product.view(states.shape[0], -1, heads.dim)
        query = operations.rotated_and_stored(product, heads, rotation, paged)
        output = attended(
            paged,
            heads.layer,
            query.transpose(0, 1),
            scaling=self._scaling,
            window=getattr(self._windowed, "sliding_window", None),
        )
        states = self._add_output(states, output.flatten(1))
        gate_up = self._gate_up(operations.normed(states, self._mlp_norm))
        return self._add_down(states, operations.gated(gate_up))


def _norm_of(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _norm_of_heads(attention: Any, queries: int, kv: int) -> Norm | None:
    """Returns the norm of queries and keys together, if a model norms each of its heads."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    weights = [query.weight.expand(queries, -1), key.weight.expand(kv, -1)]
    return Norm(torch.cat(weights), query.variance_epsilon)


def _function_of(product: nn.Module) -> Callable[[Tensor], Tensor]:
    """What it computes of rows [num_rows, in_features], without a module's hooks where that is possible."""
    return product.multiply if isinstance(product, PackedLinear) else product


def _adding(product: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """States and rows to the states plus the rows' product, in the place of the states where possible."""
    if isinstance(product, PackedLinear):
        multiply = product.multiply
        return lambda states, rows: multiply(rows, states)
    if type(product) is nn.Linear and product.bias is None:
        weight = product.weight.t()
        return lambda states, rows: states.addmm_(rows, weight)
    return lambda states, rows: product(rows).add_(states)


def decoder_of(model: Any, hidden_layers: Collection[int], operations: LayerOperations) -> Decoder | None:
    """None where the model is none of the family, or its layers are not what they are there."""
    if type(model).__name__ not in FAMILY or model.config.hidden_act != "silu":
        return None
    parts = [(layer.self_attn.q_proj, layer.mlp.gate_proj) for layer in model.model.layers]
    if not all(isinstance(product, Projection) for pair in parts for product in pair):
        return None
    return Decoder(model, hidden_layers, operations)


def layer_operations(kernel: Kernel | None, device: torch.device, dtype: torch.dtype) -> LayerOperations:
    """Returns a decoder for passes whose attention is the kernel, or None."""
    if device.type == "cpu" and dtype == torch.float32 and compiled() is not None:
        return CpuOperations()
    if kernel is None or device.type != "cuda":
        return PlainOperations()
    from outrider.engine.forward.cuda_operations import FusedOperations

    return FusedOperations()
