"""Attention while many blocks of one text are trained at once, each from an anchor in the text.

A row of a block attends to the text before its anchor, in keys and values of the target's states, and to
itself and the rows before it in its own block. All blocks take one pass, and none sees another.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "outrider_blocks"  # name without a mask function, so that transformers builds no mask


class Blocks:
    """Anchors, and the text's keys and values, that travel through the draft to every layer."""

    def __init__(self, anchors: Tensor, size: int) -> None:
        """
        Args:
            anchors: int64 [num_blocks] positions of the newest token, the first row of its block.
            size: rows of a block.
        """
        self._anchors, self._size = anchors, size
        self._text: list[tuple[Tensor, Tensor]] = []

    def read(self, key: Tensor, value: Tensor) -> None:
        """Takes the next layer's keys and values of the text: [rows, kv_heads, length, dim] each."""
        self._text.append((key, value))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Returns what the rows of all blocks attend to, in the form of ``query``.

        Args:
            query: [rows, heads, num_blocks * size, dim], block after block.
            key, value: [rows, kv_heads, num_blocks * size, dim].
        """
        group = query.shape[1] // key.shape[1]
        text_key, text_value, key, value = (
            part.repeat_interleave(group, dim=1) for part in (*self._text[layer], key, value)
        )
        length, of_blocks = text_key.shape[2], (*query.shape[:2], len(self._anchors), self._size, -1)
        unseen = torch.arange(length, device=query.device) >= self._anchors[:, None]
        of_text = (query @ text_key.transpose(-1, -2)).float().view(of_blocks)
        of_text = of_text.masked_fill(unseen[:, None], -torch.inf)
        query, key, value = (part.reshape(of_blocks) for part in (query, key, value))
        later = torch.ones(self._size, self._size, dtype=torch.bool, device=query.device).triu(1)
        own = (query @ key.transpose(-1, -2)).float().masked_fill(later, -torch.inf)
        weights = (torch.cat([of_text, own], dim=-1) * scaling).softmax(-1).to(value.dtype)
        output = weights[..., :length].flatten(2, 3) @ text_value
        return output + (weights[..., length:] @ value).flatten(2, 3)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [rows, heads, num_tokens, dim]
    key: Tensor,  # [rows, kv_heads, num_tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    outrider: Blocks,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attends in the form transformers calls: [rows, num_tokens, heads, dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    return outrider.attend(layer, query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
