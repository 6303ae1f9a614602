"""Sampling settings that change or ban single tokens; each function is one setting.

All change float32 logits [num_rows, vocab_size] in place, every row of which asks for the setting. Token ids
beyond the vocabulary are ignored.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoding.row import Row

BANNED = -torch.inf


def add_bias(logits: Tensor, rows: Sequence[Row]) -> None:
    """Adds each token's bias to its logit."""
    at, biases = _entries(logits, [row.sampling.logit_bias for row in rows])
    logits[at] += biases


def penalize_repetition(logits: Tensor, rows: Sequence[Row]) -> None:
    """Divides positive logits, and multiplies negative ones, by the penalty: tokens of prompt and output.

    Source: Keskar et al., "CTRL", 2019, section 4.1; negative logits as in transformers.
    """
    at = _occurrences(logits, [(row.prompt, row.generated, row.path) for row in rows])
    penalties = _column(logits, [row.sampling.repetition_penalty for row in rows])[at[0]]
    seen = logits[at]
    # A token that occurs twice is written twice, with the same value.
    logits[at] = torch.where(seen > 0, seen / penalties, seen * penalties)


def penalize_output(logits: Tensor, rows: Sequence[Row]) -> None:
    """Subtracts frequency_penalty per occurrence in the output, presence_penalty once (as OpenAI does)."""
    at = _occurrences(logits, [(row.generated, row.path) for row in rows])
    presence = _column(logits, [row.sampling.presence_penalty for row in rows])[at[0]]
    frequency = _column(logits, [row.sampling.frequency_penalty for row in rows])[at[0]]
    logits[at] = logits[at] - presence
    logits.index_put_(at, -frequency, accumulate=True)


def ban_all_but_allowed(logits: Tensor, rows: Sequence[Row]) -> None:
    at, _ = _entries(logits, [dict.fromkeys(row.sampling.allowed_token_ids or (), 0.0) for row in rows])
    allowed = logits[at]
    logits.fill_(BANNED)
    logits[at] = allowed


def ban_bad(logits: Tensor, rows: Sequence[Row]) -> None:
    _ban(logits, [row.sampling.bad_token_ids for row in rows])


def ban_ends(logits: Tensor, rows: Sequence[Row]) -> None:
    """Bans the tokens that end the generation."""
    _ban(logits, [row.end_token_ids for row in rows])


def ban_masked(logits: Tensor, rows: Sequence[Row]) -> None:
    """Bans the tokens at which the row's mask is false."""
    masks = torch.stack([row.mask for row in rows if row.mask is not None]).to(logits.device)
    logits.masked_fill_(~masks, BANNED)


def _ban(logits: Tensor, banned: Sequence[Iterable[int]]) -> None:
    at, _ = _entries(logits, [dict.fromkeys(token_ids, 0.0) for token_ids in banned])
    logits[at] = BANNED


def _occurrences(logits: Tensor, texts: Sequence[tuple[Sequence[int], ...]]) -> tuple[Tensor, Tensor]:
    """Row and token id of every occurrence of a token in its row's texts, both int64 [num_occurrences]."""
    arrays: dict[int, NDArray[np.int64]] = {}  # rows of one Sequence share its lists
    for part in (part for parts in texts for part in parts):
        if id(part) not in arrays:
            arrays[id(part)] = np.fromiter(part, np.int64, len(part))
    joined = [np.concatenate([arrays[id(part)] for part in parts]) for parts in texts]
    rows = np.repeat(np.arange(len(texts)), [len(tokens) for tokens in joined])
    token_ids = np.concatenate(joined)
    inside = token_ids < logits.shape[1]
    index = torch.from_numpy(np.stack([rows[inside], token_ids[inside]])).to(logits.device)
    return index[0], index[1]


def _column(logits: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _entries(logits: Tensor, per_row: Sequence[Mapping[int, float]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Index (rows, token ids) into the logits, and the value at each; all [num_entries]."""
    vocab_size = logits.shape[1]
    entries = [
        (index, token, value)
        for index, values in enumerate(per_row)
        for token, value in values.items()
        if token < vocab_size
    ]
    rows, token_ids, values = zip(*entries, strict=True) if entries else ((), (), ())
    index = torch.tensor([rows, token_ids], dtype=torch.int64, device=logits.device)
    return (index[0], index[1]), torch.tensor(values, dtype=torch.float32, device=logits.device)
