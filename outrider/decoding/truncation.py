"""Sampling settings that keep the likeliest tokens of a row.

All functions modify float32 logits [num_rows, vocab_size] in place, after temperature; every given row uses
the setting. Among equally likely tokens at the boundary, the lower ids are kept. Probabilities are normalized
over the tokens that earlier settings have kept.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.penalties import BANNED

_BLOCK = 64
_FIRST_CANDIDATES = 64
_MORE_CANDIDATES = 16  # factor for the number of candidates if the first candidates did not hold enough mass


def keep_likeliest(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Keeps the likeliest token: temperature 0 for a rule that compares distributions."""
    _keep(logits, _largest(logits, 2), torch.ones(len(rows), dtype=torch.int64, device=logits.device))


def keep_top_k(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Keeps the k likeliest tokens."""
    vocab_size = logits.shape[1]
    counts = torch.tensor([min(row.sampling.top_k, vocab_size) for row in rows], device=logits.device)
    candidates = max(min(row.sampling.top_k + 1, vocab_size) for row in rows)
    _keep(logits, _largest(logits, candidates), counts)


def keep_top_p(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Keeps the likeliest tokens up to and including the token with which their mass reaches top_p.

    Source: Holtzman et al., "The curious case of neural text degeneration", 2020, section 3.1.
    """
    vocab_size = logits.shape[1]
    enough = torch.tensor([row.sampling.top_p for row in rows], dtype=torch.float64, device=logits.device)
    # Not logsumexp: its sums are split among threads, so they depend on the number of rows.
    largest_prob = logits.softmax(dim=1).amax(dim=1, keepdim=True).double()
    candidates = min(_FIRST_CANDIDATES, vocab_size)
    while True:
        largest = _largest(logits, candidates)
        mass = (largest.double() - largest[:, :1]).exp_().mul_(largest_prob).cumsum_(dim=1)
        counts = (mass < enough[:, None]).sum(dim=1) + 1
        if candidates == vocab_size or bool((counts < candidates).all()):
            break
        candidates = min(candidates * _MORE_CANDIDATES, vocab_size)
    _keep(logits, largest, counts.clamp_(max=vocab_size))


def keep_min_p(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    """Keeps the tokens at least min_p times as likely as the likeliest.

    Source: Nguyen et al., "Turning up the heat: min-p sampling", 2024, section 3.
    """
    distances = torch.tensor([[math.log(row.sampling.min_p)] for row in rows], device=logits.device)
    logits.masked_fill_(logits < logits.amax(dim=1, keepdim=True) + distances, BANNED)


def _keep(logits: Tensor, largest: Tensor, counts: Tensor) -> None:
    """Keeps counts[row] tokens of each row. largest: one logit more than is kept, in descending order."""
    last = largest.gather(1, counts[:, None] - 1)
    logits.masked_fill_(logits < last, BANNED)
    following = largest.gather(1, counts[:, None].clamp(max=largest.shape[1] - 1))
    tied = ((following == last) & (last > BANNED)).squeeze(1) & (counts < largest.shape[1])
    ties_kept = counts - (largest > last).sum(dim=1)
    if logits.device.type != "cpu":
        ties_kept = torch.where(tied, ties_kept, logits.shape[1])
        logits.masked_fill_(ties_after(logits == last, ties_kept), BANNED)
        return
    # A loop over the tied rows needs no device synchronization here, and few rows are tied.
    for row in tied.nonzero().flatten().tolist():
        ties = (logits[row] == last[row]).nonzero().flatten()
        logits[row, ties[int(ties_kept[row]) :]] = BANNED


def ties_after(is_tie: Tensor, counts: Tensor) -> Tensor:
    """Returns bool [num_rows, vocab_size], like is_tie: each row's ties except the first counts[row]."""
    num_rows, vocab_size = is_tie.shape
    blocks = torch.nn.functional.pad(is_tie, (0, -vocab_size % _BLOCK)).view(num_rows, -1, _BLOCK)
    # Cumulative sums over blocks are much cheaper than over tokens.
    up_to = blocks.sum(dim=2, dtype=torch.int32).cumsum(dim=1)
    block = (up_to < counts[:, None]).sum(dim=1, keepdim=True).clamp_(max=blocks.shape[1] - 1)
    inside = blocks.take_along_dim(block[:, :, None], dim=1).squeeze(1)
    missing = counts[:, None] - up_to.gather(1, block) + inside.sum(dim=1, keepdim=True)
    last = block * _BLOCK + (inside.cumsum(dim=1) < missing).sum(dim=1, keepdim=True)
    return is_tie & (torch.arange(vocab_size, dtype=torch.int32, device=is_tie.device) > last.int())


def _largest(logits: Tensor, count: int) -> Tensor:
    """Returns the largest logits in descending order: float32 [num_rows, count]."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if 4 * count * _BLOCK > whole:
        return logits.topk(count, dim=1).values
    # The ``count`` largest logits lie in the ``count`` blocks with the largest maxima, which are cheap.
    blocks = logits[:, :whole].reshape(len(logits), -1, _BLOCK)
    best = blocks.amax(dim=2).topk(count, dim=1).indices
    candidates = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    return torch.cat([candidates, logits[:, whole:]], dim=1).topk(count, dim=1).values
