"""Latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): what is cached of a token is one vector for all heads.

The vector is a latent, from which transformers expands keys and values of every head before it attends, and
the rotated part of the keys. Here a query is multiplied by its head's part of the expansion instead. So it
meets the cached vectors themselves. What it gathers is a latent too, expanded afterwards. Prompts, Drafts and
plain decoding take this same way.
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
        """Returns what meets the cached vectors, [heads, num_tokens, latent + rotated].

        query: [heads, num_tokens, key + rotated].
        """
        plain, rotated = query.tensor_split([self._key_dim], -1)
        return torch.cat([plain @ self._by_head()[:, : self._key_dim], rotated], -1)

    def expanded(self, output: Tensor) -> Tensor:
        """Returns values [num_tokens, heads, value] of gathered latents [num_tokens, heads, latent]."""
        values = self._by_head()[:, self._key_dim :]
        return (output.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)

    def _by_head(self) -> Tensor:
        """Returns the weight [heads, key + value, latent]."""
        return self.weight.view(-1, self._key_dim + self._value_dim, self.latent_dim)


def may_cache_latents(device_type: str, dtype: torch.dtype) -> bool:
    """Whether latents may be cached: the kernel of a GPU takes no head as wide, and float16 rounds too much.

    In float16 a small DeepSeek-V3 differed from transformers by 2.4 times what the self-check allows.
    """
    return device_type == "cpu" and dtype != torch.float16


def use_latents(model: Any, ours: str) -> None:
    """Has latent attention hand its latents to our attention, in place.

    ours: name of our attention. Under any other, the model expands them as before.
    """
    for attention in [*model.modules()]:
        if hasattr(attention, "expand_kv") and hasattr(attention, "kv_b_proj"):
            attention.kv_b_proj = LatentProjection(attention)
            attention.expand_kv = _latents_under(ours, attention.config, attention.expand_kv)


def _latents_under(ours: str, config: Any, expand: Callable[..., Any]) -> Callable[..., Any]:
    def joined(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cached vectors as keys, [1, 1, num_tokens, latent + rotated], and values of no numbers."""
        if config._attn_implementation != ours:
            return expand(latents, rotated)  # type: ignore[no-any-return]
        return torch.cat([latents, rotated], -1), latents[..., :0]

    return joined
