"""Attention of drafters under training. An object that travels through the model attends in every layer."""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "outrider_training"  # name without a mask function, so that transformers builds no mask


class TrainingAttention(Protocol):
    """Keys and values of a text and of the Drafts that are trained on it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Returns what the tokens attend to, in the form of ``query``.

        Args:
            query: [rows, heads, num_tokens, dim].
            key, value: [rows, kv_heads, num_tokens, dim].
        """


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [rows, heads, num_tokens, dim]
    key: Tensor,  # [rows, kv_heads, num_tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    outrider: TrainingAttention,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attends in the form transformers calls: [rows, num_tokens, heads, dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    return outrider.attend(layer, query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
