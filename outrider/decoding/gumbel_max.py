"""Best tokens by logits plus keyed Gumbel noise: the sampled token first, then its alternatives."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.noise import gumbel, gumbel_at, gumbel_bound
from outrider.decoding.penalties import BANNED

_BLOCK = 64  # tokens of a block, which is searched if its largest bound is high enough
_FIRST_BLOCKS = 8  # blocks searched first; they almost always hold the best tokens
_MORE_BLOCKS = 8  # factor for the number of blocks if the first blocks did not suffice
_FEW = 1024  # allowed tokens up to which exact noise costs less than bounds for the whole vocabulary

Best = tuple[Tensor, Tensor]  # token ids, int64, and perturbed logits, float32, both [num_rows, count]


def gumbel_max(processed: Tensor, rows: Sequence[ChoiceContext], count: int) -> Best:
    """Returns the tokens with the largest perturbed logits, in descending order; ties go to the lowest id.

    ``processed`` is float32 [num_rows, vocab_size]. The noise is determined by (noise key, position); greedy
    rows get no noise.
    """
    searches = [_search(row) for row in rows]
    if len(set(searches)) == 1:
        return searches[0](processed, rows, count)
    token_ids = torch.empty(len(rows), count, dtype=torch.int64, device=processed.device)
    values = torch.empty(len(rows), count, device=processed.device)
    for search in dict.fromkeys(searches):
        same = [index for index, other in enumerate(searches) if other is search]
        token_ids[same], values[same] = search(processed[same], [rows[index] for index in same], count)
    return token_ids, values


def best(values: Tensor, count: int) -> Best:
    """Returns the largest values of each row, descending, -inf last; ties go to the lowest index."""
    if values.device.type == "cpu":
        return _best_on_host(values.numpy(), count)
    remaining = values
    if count > 1:
        remaining = values.clamp(min=torch.finfo(values.dtype).min)  # -inf marks values that were picked
    picks = torch.empty(len(values), count, dtype=torch.int64, device=values.device)
    for rank in range(count):
        picks[:, rank] = remaining.argmax(dim=1)
        if rank + 1 < count:
            remaining.scatter_(1, picks[:, rank : rank + 1], BANNED)
    return picks, values.gather(1, picks)


def _best_on_host(values: NDArray[np.float32], count: int) -> Best:
    """Computes ``best`` in numpy, whose argmax is eight times as fast as torch's at a large vocabulary."""
    rows, remaining = np.arange(len(values)), values
    if count > 1:
        remaining = np.maximum(values, np.finfo(values.dtype).min)  # -inf marks values that were picked
    picks = np.empty((len(values), count), np.int64)
    for rank in range(count):
        picks[:, rank] = found = remaining.argmax(axis=1)
        if rank + 1 < count:
            remaining[rows, found] = BANNED
    return torch.from_numpy(picks), torch.from_numpy(values[rows[:, None], picks])


def _search(row: ChoiceContext) -> Callable[[Tensor, Sequence[ChoiceContext], int], Best]:
    """Returns the cheapest search that the settings of a row allow."""
    sampling = row.sampling
    if row.is_greedy:
        return _greedy
    is_truncated = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    is_small = row.num_allowed is not None and row.num_allowed <= _FEW
    return _of_few if is_truncated or is_small or sampling.allowed_token_ids is not None else _of_all


def _greedy(processed: Tensor, rows: Sequence[ChoiceContext], count: int) -> Best:
    return best(processed, count)


def _of_few(processed: Tensor, rows: Sequence[ChoiceContext], count: int) -> Best:
    """Searches with noise for only those tokens that the settings have not banned."""
    perturbed = processed.clone()
    at, token_ids = _support(processed)
    perturbed[at, token_ids] += gumbel_at(*_noise_of(rows), at, token_ids)
    return best(perturbed, count)


def _of_all(processed: Tensor, rows: Sequence[ChoiceContext], count: int) -> Best:
    """Searches with exact noise in only those blocks that may hold the best tokens according to a bound."""
    num_rows, vocab_size = processed.shape
    num_blocks = -(-vocab_size // _BLOCK)
    keys, positions = _noise_of(rows)
    if num_blocks <= 8 * _FIRST_BLOCKS:
        return best(gumbel(keys, positions, vocab_size, processed.device).add_(processed), count)
    bounds = gumbel_bound(keys, positions, vocab_size, processed.device).add_(processed)
    maxima = torch.nn.functional.pad(bounds, (0, -vocab_size % _BLOCK), value=BANNED)
    maxima = maxima.view(num_rows, num_blocks, _BLOCK).amax(dim=2)
    looked_at = _FIRST_BLOCKS
    while True:
        largest, blocks = maxima.topk(min(looked_at + 1, num_blocks), dim=1)
        firsts = blocks[:, :looked_at].sort(dim=1).values * _BLOCK  # first tokens of the blocks
        candidates = (firsts[:, :, None] + torch.arange(_BLOCK, device=blocks.device)).flatten(1)
        inside = candidates.clamp(max=vocab_size - 1)
        at = torch.arange(num_rows, device=processed.device)[:, None].expand_as(inside)
        exact = gumbel_at(keys, positions, at.flatten(), inside.flatten()).view_as(inside)
        exact = exact.add_(processed.gather(1, inside)).masked_fill_(candidates >= vocab_size, BANNED)
        picks, values = best(exact, count)
        if looked_at >= num_blocks or bool((values[:, -1] > largest[:, -1]).all()):
            return candidates.gather(1, picks), values
        looked_at *= _MORE_BLOCKS


def _support(processed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row and the token id of every token that may be chosen, both int64 [num_tokens]."""
    num_rows, vocab_size = processed.shape
    width = _BLOCK if vocab_size % _BLOCK == 0 else 1
    # Few blocks hold such a token, and the maximum of a block is cheap.
    blocks = processed.reshape(num_rows, -1, width)
    at, block = (blocks.amax(dim=2) > BANNED).nonzero(as_tuple=True)
    picked, offset = (blocks[at, block] > BANNED).nonzero(as_tuple=True)
    return at[picked], block[picked] * width + offset


def _noise_of(rows: Sequence[ChoiceContext]) -> tuple[list[int], list[int]]:
    return [row.noise_key for row in rows], [row.position for row in rows]
