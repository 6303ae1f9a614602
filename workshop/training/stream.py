"""Texts end to end, and the windows of them that training reads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """Texts end to end."""

    tokens: Tensor  # int64 [num_tokens]
    starts: Tensor  # int64 [num_texts], offsets of first tokens

    @classmethod
    def of(cls, texts: list[list[int]]) -> "Stream":
        """Joins texts in their order."""
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.tensor([token for text in texts for token in text])
        return cls(tokens, lengths.cumsum(0) - lengths)

    def windows(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Returns windows at random starts of texts and at random offsets in turn: int64 [rows, length]."""
        windows = self.openings(rows, length, generator)
        offsets = torch.randint(len(self.tokens) - length + 1, (rows,), generator=generator)
        windows[1::2] = self.tokens[offsets[1::2, None] + torch.arange(length)]
        return windows

    def openings(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Returns windows at random starts of texts: int64 [rows, length]."""
        texts = torch.randint(len(self.starts), (rows,), generator=generator)
        starts = self.starts[texts].clamp(max=len(self.tokens) - length)
        return self.tokens[starts[:, None] + torch.arange(length)]
