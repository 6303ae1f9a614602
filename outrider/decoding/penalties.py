"""Sampling settings that change or ban single tokens; each function is one setting.

All functions modify float32 logits [num_rows, vocab_size] in place; every given row uses the setting. Token
ids beyond the vocabulary are ignored.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext, TokenIds, to_device

BANNED = -torch.inf


def add_bias(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Adds each token's bias to its logit."""
    at, biases = _entries(logits, [row.lists.biased for row in rows], [row.lists.biases for row in rows])
    logits[at] += biases


def penalize_repetition(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Divides positive logits of tokens of prompt and output by the penalty, and multiplies negative logits.

    Source: Keskar et al., "CTRL", 2019, section 4.1; negative logits as in transformers.
    """
    at = _occurrences(logits, [(row.prompt, row.generated, row.path) for row in rows])
    penalties = _column(logits, [row.sampling.repetition_penalty for row in rows])[at[0]]
    seen = logits[at]
    # A token that occurs twice is written twice with the same value.
    logits[at] = torch.where(seen > 0, seen / penalties, seen * penalties)


def penalize_output(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Subtracts frequency_penalty for each occurrence in the output, presence_penalty once (like OpenAI)."""
    at = _occurrences(logits, [(row.generated, row.path) for row in rows])
    presence = _column(logits, [row.sampling.presence_penalty for row in rows])[at[0]]
    frequency = _column(logits, [row.sampling.frequency_penalty for row in rows])[at[0]]
    logits[at] = logits[at] - presence
    logits.index_put_(at, -frequency, accumulate=True)


def ban_all_but_allowed(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    at, _ = _entries(logits, [row.lists.allowed for row in rows])
    allowed = logits[at]
    logits.fill_(BANNED)
    logits[at] = allowed


def ban_bad(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    _ban(logits, [row.lists.bad for row in rows])


def ban_ends(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Bans the tokens that end the generation."""
    _ban(logits, [row.lists.ends for row in rows])


def _ban(logits: Tensor, tokens: Sequence[TokenIds]) -> None:
    at, _ = _entries(logits, tokens)
    logits[at] = logits.new_full((), BANNED)  # a Python number would be copied from the host, which blocks


def ban_refused(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Bans the tokens that the rows' grammars refuse."""
    masks = np.stack([row.mask for row in rows if row.mask is not None])
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    logits.masked_fill_(to_device(torch.from_numpy(allowed == 0), logits.device), BANNED)


def leave_an_end(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Allows the lowest end token if every token is banned; token 0 if there is no end token."""
    stuck = (logits.amax(dim=1) == BANNED).to(logits.dtype)
    ends = to_device(torch.tensor([[min(row.end_token_ids, default=0)] for row in rows]), logits.device)
    # A row without an allowed token gets logit 0 there; other rows keep their values.
    held = logits.gather(1, ends)
    logits.scatter_(1, ends, torch.where(stuck[:, None] > 0, 0.0, held))


def _occurrences(
    logits: Tensor, texts: Sequence[tuple[Sequence[int] | TokenIds, ...]]
) -> tuple[Tensor, Tensor]:
    """Returns the row and the token id of every token in the rows' texts, both int64 [num_occurrences]."""
    arrays: dict[int, NDArray[np.int64]] = {}  # converted once: rows of one sequence share its lists
    for part in (part for parts in texts for part in parts):
        if id(part) not in arrays:
            arrays[id(part)] = np.asarray(part, np.int64)
    joined = [np.concatenate([arrays[id(part)] for part in parts]) for parts in texts]
    rows = np.repeat(np.arange(len(texts)), [len(tokens) for tokens in joined])
    token_ids = np.concatenate(joined)
    inside = token_ids < logits.shape[1]
    index = to_device(torch.from_numpy(np.stack([rows[inside], token_ids[inside]])), logits.device)
    return index[0], index[1]


def _column(logits: Tensor, values: Sequence[float]) -> Tensor:
    return to_device(torch.tensor(values, dtype=logits.dtype), logits.device)


def _entries(
    logits: Tensor, ids: Sequence[TokenIds], values: Sequence[NDArray[np.float32]] = ()
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns rows, token ids and values of each row's entries: all [num_entries]."""
    token_ids = np.concatenate(ids)
    rows = np.repeat(np.arange(len(ids)), [len(part) for part in ids])
    inside = token_ids < logits.shape[1]
    index = to_device(torch.from_numpy(np.stack([rows[inside], token_ids[inside]])), logits.device)
    of_each = np.concatenate(values)[inside] if values else np.zeros(0, np.float32)
    return (index[0], index[1]), to_device(torch.from_numpy(of_each), logits.device)
