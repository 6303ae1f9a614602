"""Perturbed logits: logits plus keyed Gumbel noise, whose argmax is a sample."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.adjustments import BANNED
from decoding.noise import gumbel, gumbel_at
from decoding.row import Row

_BLOCK = 64


def perturb(processed: Tensor, rows: Sequence[Row]) -> Tensor:
    """Adds the noise of (noise key, position) to float32 [num_rows, vocab_size], except in greedy rows.

    The argmax is then distributed as softmax(processed): the Gumbel-max trick. To be read only, because a
    batch of greedy rows comes back itself.
    """
    sampled = [index for index, row in enumerate(rows) if not row.is_greedy]
    narrow = [index for index in sampled if _is_narrow(rows[index])]
    wide = [index for index in sampled if not _is_narrow(rows[index])]
    if not sampled:
        return processed
    keys, positions = [row.noise_key for row in rows], [row.position for row in rows]
    if len(wide) == len(rows):
        return gumbel(keys, positions, processed.shape[1], processed.device).add_(processed)
    perturbed = processed.clone()
    if wide:
        wide_keys, wide_positions = [keys[index] for index in wide], [positions[index] for index in wide]
        perturbed[wide] += gumbel(wide_keys, wide_positions, processed.shape[1], processed.device)
    if narrow:
        at, token_ids = _support(processed, narrow)
        perturbed[at, token_ids] += gumbel_at(keys, positions, at, token_ids)
    return perturbed


def _is_narrow(row: Row) -> bool:
    """Whether the settings usually leave so few tokens that noise for those alone is cheaper."""
    sampling = row.sampling
    is_truncated = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return is_truncated or sampling.allowed_token_ids is not None


def _support(processed: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Row and token id of every token that may be chosen in these rows, both int64 [num_tokens]."""
    num_rows, vocab_size = processed.shape
    width = _BLOCK if vocab_size % _BLOCK == 0 else 1
    # Few blocks hold such a token, and maxima are cheap.
    blocks = processed.reshape(num_rows, -1, width)
    wanted = torch.zeros(num_rows, 1, dtype=torch.bool, device=processed.device)
    wanted[list(rows)] = True
    at, block = ((blocks.amax(dim=2) > BANNED) & wanted).nonzero(as_tuple=True)
    picked, offset = (blocks[at, block] > BANNED).nonzero(as_tuple=True)
    return at[picked], block[picked] * width + offset
