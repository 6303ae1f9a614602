"""Attention while many Drafts of one text are trained at once, a chain from each of its positions.

A first pass reads the text. Each later pass adds a token to every chain. The token attends to the text up to
the position that its chain starts from, and to the chain. So one pass over all chains does what drafting
does one position at a time.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class LayerChains:
    """Keys and values of one layer, [rows, heads, num_tokens, dim] each."""

    text: tuple[Tensor, Tensor]
    tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # tokens of all chains, a pass each


class Chains:
    """Keys, values and positions that travel through the model to every layer."""

    def __init__(self) -> None:
        self.starts: Tensor | None = (
            None  # int64 [num_chains] position after which each chain begins; None: no chain yet
        )
        self._layers: dict[int, LayerChains] = {}

    def start(self, starts: Tensor) -> None:
        """Begins chains at these positions, after the pass over the text."""
        self.starts = starts

    def keep(self, kept: Tensor) -> None:
        """Drops all other chains. kept: int64, indices of chains."""
        assert self.starts is not None
        self.starts = self.starts[kept]
        for layer in self._layers.values():
            layer.tokens = [(key[:, :, kept], value[:, :, kept]) for key, value in layer.tokens]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Returns what the tokens attend to; they are one of each chain once chains have begun.

        Args:
            query: [rows, heads, num_tokens, dim].
            key, value: [rows, kv_heads, num_tokens, dim].
        """
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        if self.starts is None:
            self._layers[layer] = LayerChains((key, value))
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        of_layer = self._layers[layer]
        of_layer.tokens.append((key, value))
        text_keys, text_values = of_layer.text
        length = text_keys.shape[2]
        unseen = torch.arange(length, device=self.starts.device) > self.starts[:, None]
        scores = (query @ text_keys.transpose(-1, -2)).float().masked_fill_(unseen, -torch.inf)
        own = [(query * keys).sum(-1, keepdim=True).float() for keys, _ in of_layer.tokens]
        weights = (torch.cat([scores, *own], dim=-1) * scaling).softmax(-1).to(value.dtype)
        output = weights[..., :length] @ text_values
        for index, (_, values) in enumerate(of_layer.tokens, start=length):
            output = output + weights[..., index : index + 1] * values
        return output
