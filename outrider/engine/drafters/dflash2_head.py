"""Modules of a DFlash2 draft: convolutions over the rows of a block, and scores of adjacent tokens.

Source: z-lab's DFlash2 of 2026, as the speculators package computes it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

INPUT, OUTPUT = 0, 1  # before or after attention or the MLP


class BlockConvolution(nn.Module):
    """Causal convolution over the rows of a block, with a kernel that depends on each row."""

    def __init__(self, size: int, block_size: int, taps: int, group: int) -> None:
        """
        Args:
            size: features of a row.
            taps: kernel size: the row itself, and the rows before it.
            group: neighbouring features that share the row-dependent part of the kernel.
        """
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)
        self._block_size, self._taps, self._group = block_size, taps, group

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns convolved rows, and the row-dependent kernels of both sides.

        The kernels are [2, ..., num_rows, taps, size].

        rows: [..., num_rows, size] of whole blocks.
        """
        chosen = self.kernel_projection(rows).view(*rows.shape[:-1], 2, self._taps, -1).movedim(-3, 0)
        kernel = chosen.repeat_interleave(self._group, dim=-1)
        return self.mixed(rows, kernel, INPUT), kernel

    def mixed(self, rows: Tensor, kernel: Tensor, side: int) -> Tensor:
        """Returns convolved rows, in the shape of ``rows``. kernel: row-dependent kernels of both sides."""
        of_blocks = (*rows.shape[:-2], -1, self._block_size)
        weights = (self.base_kernel[side] + kernel[side]).view(*of_blocks, self._taps, rows.shape[-1])
        blocks = rows.reshape(*of_blocks, rows.shape[-1])
        before = pad(blocks, (0, 0, self._taps - 1, 0))  # zeros before a block
        steps = (
            weights[..., back, :] * before.narrow(-2, self._taps - 1 - back, self._block_size)
            for back in range(self._taps)
        )
        return torch.stack([*steps]).sum(0).flatten(-3, -2)


class ConvolvedLayer(Qwen3DecoderLayer):  # type: ignore[misc]
    """Decoder layer with convolutions before and after attention, and before and after the MLP."""

    def __init__(self, config: Any, layer: int, block_size: int, taps: int, group: int) -> None:
        """Arguments: as for ``BlockConvolution``."""
        super().__init__(config, layer)
        self.attention_conv = BlockConvolution(config.hidden_size, block_size, taps, group)
        self.mlp_conv = BlockConvolution(config.hidden_size, block_size, taps, group)

    def forward(self, hidden_states: Tensor, **attended: Any) -> Tensor:
        rows, kernel = self.attention_conv(self.input_layernorm(hidden_states))
        rows = self.self_attn(hidden_states=rows, attention_mask=None, **attended)[0]
        states = hidden_states + self.attention_conv.mixed(rows, kernel, OUTPUT)
        rows, kernel = self.mlp_conv(self.post_attention_layernorm(states))
        output: Tensor = states + self.mlp_conv.mixed(self.mlp(rows), kernel, OUTPUT)
        return output


class CandidateSelector(nn.Module):
    """Rescores the likeliest tokens of a row by the token before it, and excludes all other tokens."""

    def __init__(self, rank: int, candidates: int, size: int, vocabulary: int) -> None:
        """
        Args:
            rank: size of a token's embedding in the codebooks.
            candidates: number of likeliest tokens that are rescored.
            size: size of a row's state.
        """
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self._candidates = candidates

    def forward(self, states: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns logits [num_rows, vocabulary], -inf for tokens that are not candidates.

        Args:
            states: [num_rows, hidden_size] states of the rows that guess.
            logits: [num_rows, vocabulary] logits of the rows.
            tokens: int64 [num_rows] token before each guess.
        """
        best = logits.topk(self._candidates, dim=-1)
        sought = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        follows = (self.successor_codebook[best.indices] @ sought[..., None])[..., 0]
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values + follows)
