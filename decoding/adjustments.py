"""Sampling settings that change or ban single tokens; each function is one setting.

All change float32 logits [num_rows, vocab_size] in place, every row of which asks for the setting. Token ids
beyond the vocabulary are ignored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
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
    penalties = [
        dict.fromkeys({*row.prompt, *row.generated, *row.path}, row.sampling.repetition_penalty)
        for row in rows
    ]
    at, factors = _entries(logits, penalties)
    seen = logits[at]
    logits[at] = torch.where(seen > 0, seen / factors, seen * factors)


def penalize_output(logits: Tensor, rows: Sequence[Row]) -> None:
    """Subtracts frequency_penalty per occurrence in the output, presence_penalty once (as OpenAI does)."""
    penalties = []
    for row in rows:
        presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
        counts = Counter((*row.generated, *row.path))
        penalties.append({token: presence + frequency * count for token, count in counts.items()})
    at, values = _entries(logits, penalties)
    logits[at] -= values


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
