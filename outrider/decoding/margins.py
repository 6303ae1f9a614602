"""Margins of given tokens: how far each token is from being chosen under keyed noise. Used by audits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.noise import gumbel
from outrider.decoding.penalties import BANNED
from outrider.decoding.sampling import BEFORE_TRUNCATION, SCORED_AT_ONCE, process
from outrider.decoding.settings import Sampling


def margins(logits: Tensor, rows: Sequence[ChoiceContext], tokens: Sequence[int]) -> list[float]:
    """Returns the margin of each row's token, in nats; 0 if the row chooses that token.

    A margin is the smallest change of differences between logits, after temperature, that makes the token the
    choice. The token must be kept by top_k, top_p and min_p, and each rival must be beaten or dropped by
    them. The margin is infinite if the settings ban the token whatever the logits are.

    Args:
        logits: [num_rows, vocab_size] of any float type; the largest logit of each row is finite.
        tokens: [num_rows] token ids.
    """
    found: list[float] = []
    for first in range(0, len(tokens), SCORED_AT_ONCE):
        part = slice(first, first + SCORED_AT_ONCE)
        found += _margins(logits[part], rows[part], tokens[part])
    return found


def _margins(logits: Tensor, rows: Sequence[ChoiceContext], tokens: Sequence[int]) -> list[float]:
    chosen = gumbel_max(process(logits, rows), rows, 1)[0][:, 0].tolist()
    found = [0.0] * len(tokens)
    wrong = [place for place, token in enumerate(tokens) if token != chosen[place]]
    if wrong:
        asked = torch.tensor([tokens[place] for place in wrong], device=logits.device)
        distances = _distances(logits[wrong], [rows[place] for place in wrong], asked).tolist()
        for place, distance in zip(wrong, distances, strict=True):
            found[place] = distance
    return found


def _distances(logits: Tensor, rows: Sequence[ChoiceContext], tokens: Tensor) -> Tensor:
    """Returns the margins of tokens that are not chosen: float32 [num_rows]."""
    values, at = process(logits, rows, BEFORE_TRUNCATION), tokens[:, None]
    keys, positions = [row.noise_key for row in rows], [row.position for row in rows]
    noise = gumbel(keys, positions, values.shape[1], values.device)
    noise[[place for place, row in enumerate(rows) if row.is_greedy]] = 0.0
    pairs = zip(values, rows, strict=True)
    inside = torch.stack([_inside(of_row, row.sampling) for of_row, row in pairs])
    perturbed = noise + values
    own = perturbed.gather(1, at)
    rivals = torch.minimum(perturbed - own, inside).scatter(1, at, BANNED)
    distances = torch.maximum(rivals.amax(dim=1), -inside.gather(1, at)[:, 0]).clamp(min=0.0)
    return distances.masked_fill(own[:, 0] == BANNED, math.inf)


def _inside(values: Tensor, sampling: Sampling) -> Tensor:
    """Returns how far each token is inside of top_k, top_p and min_p, in nats: float32 [vocab_size].

    The distance is negative for a token outside, and -inf for a banned token.

    values: float32 [vocab_size], logits divided by temperature.
    """
    is_greedy, is_banned = sampling.temperature == 0.0, values == BANNED
    inside = torch.full_like(values, math.inf, dtype=torch.float64)
    ordered, order = values.double().sort(descending=True, stable=True)
    ordered.clamp_(min=torch.finfo(values.dtype).min)
    if not is_greedy and (sampling.top_k > 0 or sampling.top_p < 1.0):
        inside.scatter_(0, order, _inside_of_ranks(ordered, sampling))
    if not is_greedy and sampling.min_p > 0.0:
        inside = torch.minimum(inside, values - ordered[0] - math.log(sampling.min_p))
    return inside.float().masked_fill(is_banned, BANNED)


def _inside_of_ranks(ordered: Tensor, sampling: Sampling) -> Tensor:
    """Returns how far each rank's token is inside of top_k and top_p: float64 [vocab_size], as ordered.

    A change of d nats drops a kept token if it moves some rank out of the truncation, and moves the token
    below that rank. For a dropped token the reverse holds. ordered: float64 [vocab_size], descending.
    """
    keeps = torch.full_like(ordered, math.inf)  # distance of each rank inside of the truncation, descending
    if sampling.top_k > 0:
        keeps[sampling.top_k :] = BANNED
    if sampling.top_p < 1.0:
        mass = ordered.masked_fill(keeps < 0.0, BANNED).softmax(dim=0)
        odds = (mass.cumsum(dim=0) - mass).clamp(0.0, 1.0).logit()  # log-odds of the mass above each rank
        keeps = torch.minimum(keeps, math.log(sampling.top_p / (1.0 - sampling.top_p)) - odds)
    # Before the crossing a rank's own distance is larger; after it, the token's distance from the rank is.
    crossing = torch.searchsorted(-(keeps + ordered), -ordered)
    none = keeps.new_tensor([math.inf])
    ranks, tokens = torch.cat([none, keeps, -none]), torch.cat([none, ordered, -none])
    falls = torch.minimum(ranks[crossing], ordered - tokens[crossing + 1])
    comes = torch.maximum(ranks[crossing + 1], ordered - tokens[crossing])
    return torch.where(keeps > 0.0, falls, comes)
