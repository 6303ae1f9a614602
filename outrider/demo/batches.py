"""Tokens of the corpus, and the windows of them that training reads."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.demo.tokenizer import END_OF_TEXT


@dataclass(frozen=True)
class Stream:
    """Documents of one kind end to end, each closed by the end-of-text token."""

    tokens: Tensor  # int64 [num_tokens]
    starts: Tensor  # int64 [num_documents], offsets of first tokens

    def windows(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Return windows at random document starts and at random offsets in turn, int64 [rows, length]."""
        windows = self.openings(rows, length, generator)
        offsets = torch.randint(len(self.tokens) - length + 1, (rows,), generator=generator)
        windows[1::2] = self.tokens[offsets[1::2, None] + torch.arange(length)]
        return windows

    def openings(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Return windows at random document starts, int64 [rows, length]."""
        documents = torch.randint(len(self.starts), (rows,), generator=generator)
        starts = self.starts[documents].clamp(max=len(self.tokens) - length)
        return self.tokens[starts[:, None] + torch.arange(length)]


def make_stream(tokenizer: Tokenizer, texts: list[str]) -> Stream:
    """Tokenize documents and join them."""
    documents = [[*encoding.ids, END_OF_TEXT] for encoding in tokenizer.encode_batch_fast(texts)]
    lengths = torch.tensor([len(document) for document in documents])
    tokens = torch.tensor([token for document in documents for token in document])
    return Stream(tokens, lengths.cumsum(0) - lengths)


def mixed_batch(
    streams: dict[str, Stream], weights: dict[str, int], rows: int, length: int, generator: torch.Generator
) -> Tensor:
    """Return windows of all kinds, each drawn with its weight, int64 [rows, length]."""
    shares = torch.tensor([float(weight) for weight in weights.values()])
    counts = torch.multinomial(shares, rows, replacement=True, generator=generator).bincount(
        minlength=len(weights)
    )
    parts = [
        streams[kind].windows(count, length, generator)
        for kind, count in zip(weights, counts.tolist(), strict=True)
        if count
    ]
    return torch.cat(parts)
