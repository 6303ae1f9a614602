"""Token streams of the corpus, and training batches drawn from them."""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from workshop.demo.tokenizer import END_OF_TEXT
from workshop.training.stream import Stream


def make_stream(tokenizer: Tokenizer, texts: list[str]) -> Stream:
    """Tokenizes documents and joins them, each followed by the end-of-text token."""
    return Stream.of([[*encoding.ids, END_OF_TEXT] for encoding in tokenizer.encode_batch_fast(texts)])


def mixed_batch(
    streams: dict[str, Stream], weights: dict[str, int], rows: int, length: int, generator: torch.Generator
) -> Tensor:
    """Returns windows of text, int64 [rows, length]. Their kinds are drawn by weight."""
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
