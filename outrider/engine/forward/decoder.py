"""Decoders of the Llama family, computed in few operations.

transformers writes a layer as some sixty operations in ten modules. Where a step takes a few milliseconds,
starting them takes longer than their arithmetic, on a CPU and on a GPU. Here the same layer is about twenty
operations and no module but its matrix products:

- queries, keys and values come from one product, gate and up from one, and a product adds the residual;
- queries and keys are rotated together, by cosines and sines that are computed once per step;
- a norm reads its numbers once;
- of the last layer's states only the rows whose logits are wanted are normed.

The result is within rounding of transformers'. The self-check compares the two at load.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.forward.attention import Paged, paged_attention
from outrider.engine.forward.linear import PackedLinear, Projection

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Decoder:
    """A model of the family, in the place of its `forward`. Its linear layers may have been replaced."""

    def __init__(self, model: Any, hidden_layers: Collection[int]) -> None:
        """hidden_layers: whose states are asked for, as transformers numbers them; 0: the embeddings."""
        body = model.model
        self._embedding = body.embed_tokens.weight
        self._layers = [_Layer(layer) for layer in body.layers]
        self._rotary = body.rotary_emb
        norm = body.norm  # another module where a part of the model leaves early
        is_usual = hasattr(norm, "variance_epsilon")
        self._norm = _Norm(norm.weight, norm.variance_epsilon) if is_usual else norm
        self._head = model.lm_head
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
        kept = {0: states} if 0 in self._hidden_layers else {}
        for number, layer in enumerate(self._layers, 1):
            states = layer(states, rotation, paged)
            if number in self._hidden_layers:
                kept[number] = states
        if len(self._layers) in self._hidden_layers:  # the last one's are kept normed
            states = kept[len(self._layers)] = self._norm(states)
            wanted = states[batch.logit_rows]
        else:
            wanted = self._norm(states[batch.logit_rows])
        hidden = [kept[number] for number in self._hidden_layers]
        return self._head(wanted), torch.stack(hidden, dim=1) if hidden else None

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of the first half turned: [num_tokens, 1, head_dim] each."""
        angles = positions[:, None].float() * self._rotary.inv_freq
        scale = self._rotary.attention_scaling
        cosines, sines = angles.cos() * scale, angles.sin() * scale
        joined = torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)
        return joined[0][:, None].to(dtype), joined[1][:, None].to(dtype)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        # Whose window it is; the self-check shortens it for a while.
        self._windowed = attention.config if type(attention).__name__ == "MistralAttention" else attention
        self._attention_norm = _Norm(layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        self._query_key_value = attention.q_proj.shared.product
        widths = attention.q_proj.shared.widths
        self._heads, self._kv_heads, _ = (width // self._head_dim for width in widths)
        self._head_norm = self._norm_of_heads(attention)
        self._output = attention.o_proj
        norm = layer.post_attention_layernorm
        self._mlp_norm = _Norm(norm.weight, norm.variance_epsilon)
        self._gate_up = mlp.gate_proj.shared.product
        self._down = mlp.down_proj

    def _norm_of_heads(self, attention: Any) -> "_Norm | None":
        """Of queries and keys together, where a model norms each of its heads."""
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm, attention.k_norm
        weights = [query.weight.expand(self._heads, -1), key.weight.expand(self._kv_heads, -1)]
        return _Norm(torch.cat(weights), query.variance_epsilon)

    def __call__(self, states: Tensor, rotation: tuple[Tensor, Tensor], paged: Paged) -> Tensor:
        """states and result [num_tokens, hidden_size]"""
        product = self._query_key_value(self._attention_norm(states)).view(len(states), -1, self._head_dim)
        turned = self._heads + self._kv_heads
        query_key, value = product[:, :turned], product[:, turned:]
        if self._head_norm is not None:
            query_key = self._head_norm(query_key)
        query_key = _rotated(query_key, *rotation)
        query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        attended = paged_attention(
            paged,
            self._index,
            query.transpose(0, 1),
            key,
            value,
            scaling=self._scaling,
            window=getattr(self._windowed, "sliding_window", None),
        )
        states = _plus(states, self._output, attended.flatten(1))
        gate, up = self._gate_up(self._mlp_norm(states)).chunk(2, -1)
        return _plus(states, self._down, nn.functional.silu(gate).mul_(up))


class _Norm:
    """Root mean square normalization (Zhang and Sennrich 2019), computed in float32.

    On a GPU it is one kernel of torch's, which has none for a CPU. There a norm divides by the vector norm,
    since sqrt(mean(x^2) + epsilon) is hypot(norm(x), sqrt(size * epsilon)) / sqrt(size).
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """weight: [..., size]"""
        size = weight.shape[-1]
        self._epsilon = epsilon
        self._weight = weight.detach()
        self._scaled = self._weight.float() * size**0.5
        self._least = torch.tensor((size * epsilon) ** 0.5)

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., size] both, of the weight's dtype."""
        if rows.is_cuda:
            normed = nn.functional.rms_norm(rows, rows.shape[-1:], None, self._epsilon)
            return normed.mul_(self._weight)
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        length = torch.hypot(length, self._least)
        if rows.dtype == torch.float32:
            return rows.div(length).mul_(self._scaled)
        return rows.float().div_(length).mul_(self._scaled).to(rows.dtype)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of [num_tokens, heads, head_dim]: halves of a head make the pairs."""
    return torch.addcmul(heads * cosines, heads.roll(heads.shape[-1] // 2, -1), sines)


def _plus(states: Tensor, product: nn.Module, rows: Tensor) -> Tensor:
    """The product of the rows, and the residual."""
    if isinstance(product, PackedLinear):
        return product(rows, states)  # type: ignore[no-any-return]
    if type(product) is nn.Linear and product.bias is None:
        return torch.addmm(states, rows, product.weight.t())
    result: Tensor = product(rows)
    return result.add_(states)


def decoder_of(model: Any, hidden_layers: Collection[int]) -> Decoder | None:
    """None where the model is none of the family, or its layers are not what they are there."""
    if type(model).__name__ not in FAMILY or model.config.hidden_act != "silu":
        return None
    parts = [(layer.self_attn.q_proj, layer.mlp.gate_proj) for layer in model.model.layers]
    if not all(isinstance(product, Projection) for pair in parts for product in pair):
        return None
    return Decoder(model, hidden_layers)
