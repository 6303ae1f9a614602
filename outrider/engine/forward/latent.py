"""Latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): the cache holds a vector per token for all heads.

The vector consists of a latent and the rotated part of the keys. transformers expands the latent to keys and
values of every head before attention. Here each query is multiplied by its head's part of the expansion
instead, so that attention reads the cached vectors themselves. Its result is a latent too, which is expanded
afterwards. Prompts, Drafts and plain decoding are all computed in this way.

Every rank of a tensor-parallel model caches the same vectors; it may have only a part of the query heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.forward.linear import StoredLinear


class LatentProjection(nn.Module):
    """Projection of latents to keys and values of all heads, in place of transformers' linear layer."""

    def __init__(self, attention: Any) -> None:
        """attention: module of transformers with the projection as ``kv_b_proj``."""
        super().__init__()
        linear = attention.kv_b_proj
        weight = linear.weight
        if isinstance(linear, StoredLinear):
            weight = linear.weight.widened().to(attention.kv_a_layernorm.weight.dtype)
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)  # [heads * (key + value), latent]
        self.latent_dim: int = attention.kv_lora_rank
        self._key_dim: int = attention.qk_nope_head_dim  # without the rotated part
        self._value_dim: int = attention.v_head_dim

    def forward(self, latents: Tensor) -> Tensor:
        """Returns keys without their rotated part, and values: [..., heads * (key + value)]."""
        return nn.functional.linear(latents, self.weight)

    def absorbed(self, query: Tensor) -> Tensor:
        """Returns queries that match the cached vectors, [heads, num_tokens, latent + rotated].

        query: [heads, num_tokens, key + rotated].
        """
        plain, rotated = query.tensor_split([self._key_dim], -1)
        return torch.cat([plain @ self._by_head()[:, : self._key_dim], rotated], -1)

    def expanded(self, output: Tensor) -> Tensor:
        """Expands results of attention, [num_tokens, heads, latent], to values [num_tokens, heads, value]."""
        values = self._by_head()[:, self._key_dim :]
        return (output.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)

    def _by_head(self) -> Tensor:
        """Returns the weight [heads, key + value, latent]."""
        return self.weight.view(-1, self._key_dim + self._value_dim, self.latent_dim)


def may_cache_latents(dtype: torch.dtype) -> bool:
    """Whether latents may be cached.

    float16 rounds too much: in float16 a small DeepSeek-V3 differed from transformers by 2.4 times what the
    self-check allows.
    """
    return dtype != torch.float16


def use_latents(model: Any, ours: str) -> None:
    """Makes latent attention pass its latents to our attention, in place.

    ours: name of our attention. With any other attention the model expands its latents as before.
    """
    for attention in [*model.modules()]:
        if hasattr(attention, "expand_kv") and hasattr(attention, "kv_b_proj"):
            attention.kv_b_proj = LatentProjection(attention)
            attention.expand_kv = _latents_under(ours, attention.config, attention.expand_kv)


def _latents_under(ours: str, config: Any, expand: Callable[..., Any]) -> Callable[..., Any]:
    def joined(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cached vectors as keys, [1, 1, num_tokens, latent + rotated], and values of size 0."""
        if config._attn_implementation != ours:
            return expand(latents, rotated)  # type: ignore[no-any-return]
        return torch.cat([latents, rotated], -1), latents[..., :0]

    return joined
