"""Attention while many blocks of one text are trained at once, each from an anchor in the text.

A row of a block attends to the text before its anchor, in keys and values of the target's states, and to
itself and the rows before it in its own block. All blocks take one pass, and none sees another.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Blocks:
    """Anchors, and the text's keys and values, that travel through the draft to every layer."""

    def __init__(self, anchors: Tensor, size: int, length: int) -> None:
        """
        Args:
            anchors: int64 [num_blocks] positions of the newest token, the first row of its block.
            size: rows of a block.
            length: tokens of the text.
        """
        self._text: list[tuple[Tensor, Tensor]] = []
        rows = torch.arange(len(anchors) * size, device=anchors.device)
        blocks = rows // size
        of_text = torch.arange(length, device=anchors.device) < anchors[blocks, None]
        of_block = (blocks[:, None] == blocks) & (rows[:, None] >= rows)
        self._sees = torch.cat([of_text, of_block], dim=1)  # bool [rows of all blocks, text and these rows]

    def read(self, key: Tensor, value: Tensor) -> None:
        """Takes the next layer's keys and values of the text: [rows, kv_heads, length, dim] each."""
        self._text.append((key, value))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Returns what the rows of all blocks attend to, in the form of ``query``.

        Args:
            query: [rows, heads, num_blocks * size, dim], block after block.
            key, value: [rows, kv_heads, num_blocks * size, dim].
        """
        keys, values = (torch.cat(both, dim=2) for both in zip(self._text[layer], (key, value), strict=True))
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=self._sees, scale=scaling, enable_gqa=True
        )
