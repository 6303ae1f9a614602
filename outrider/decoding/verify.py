"""Verification: which part of a Draft is accepted, and the target's own next token.

Coupled verification compares tokens only. Rejection sampling (token by token) and block verification compare
the distributions that draft and target sampled from. They preserve the target's distribution, but the text of
a noise key then depends on the Drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.draft import ROOT, Draft, SparseProbs, Verdict
from outrider.decoding.philox import Purpose, uniform
from outrider.decoding.sampling import probabilities

_LARGEST_SUPPORT = 256  # most tokens of a draft's distribution; it keeps the message small


def verify_coupled(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Follows the target's own tokens through the Draft, a tree or a chain, as long as they were drafted.

    ``chosen[0]`` is the target's token after the last committed token, ``chosen[1 + node]`` its token after
    that node. Source: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
    speculative decoding", 2024.

    Raises:
        ValueError: ``chosen`` does not have one token for the root and for each node.
    """
    if len(chosen) != len(draft) + 1:
        raise ValueError(
            f"chosen has {len(chosen)} tokens: give {len(draft) + 1}, the root's and one per node"
        )
    accepted: list[int] = []
    tokens = [chosen[0]]
    node = draft.child(ROOT, tokens[-1])
    while node is not None:
        accepted.append(node)
        tokens.append(chosen[1 + node])
        node = draft.child(node, tokens[-1])
    return Verdict(tuple(accepted), tuple(tokens))


def verify_rejection(
    draft: Draft,
    target_probs: Tensor,  # [len(draft) + 1, vocab_size], row i after i drafted tokens
    noise_key: int,
    position: int,  # position of the first drafted token
    round: int,
) -> Verdict:
    """Accepts each drafted token with probability target_probs / draft_probs, up to the first refusal.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, algorithm 1;
    Chen et al., "Accelerating large language model decoding with speculative sampling", 2023, algorithm 2.

    Raises:
        ValueError: the Draft is not a chain with draft_probs that hold its tokens, or target_probs has a
            wrong number of rows.
    """
    ratios = _ratios(draft, target_probs)
    accepted = 0
    while accepted < len(draft):
        if uniform(noise_key, position + accepted, round, Purpose.ACCEPT) >= ratios[accepted]:
            break
        accepted += 1
    leftover = _leftover(draft, target_probs, accepted, weight=1.0)
    token = _draw_own(leftover, target_probs[accepted], noise_key, position + accepted, round)
    return Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], token))


def verify_block(
    draft: Draft,
    target_probs: Tensor,  # [len(draft) + 1, vocab_size], row i after i drafted tokens
    noise_key: int,
    position: int,  # position of the first drafted token
    round: int,
) -> Verdict:
    """Accepts the longest prefix that a block allows: on average no fewer tokens than verify_rejection.

    Source: Sun et al., "Block verification accelerates speculative decoding", 2024, algorithm 2.

    Raises:
        ValueError: as verify_rejection.
    """
    ratios = _ratios(draft, target_probs)
    weight = 1.0  # weight of the prefix: p_i in the paper
    accepted, accepted_leftover = 0, _leftover(draft, target_probs, 0, weight)
    for length, ratio in enumerate(ratios, start=1):
        weight = min(1.0, weight * ratio)
        leftover = _leftover(draft, target_probs, length, weight)
        mass = float(leftover.sum())
        # The brackets keep a small mass from being rounded away next to 1: at weight 1 it is accepted.
        accept = mass / (mass + (1.0 - weight)) if mass > 0.0 else 0.0
        if uniform(noise_key, position + length - 1, round, Purpose.ACCEPT) < accept:
            accepted, accepted_leftover = length, leftover
    token = _draw_own(accepted_leftover, target_probs[accepted], noise_key, position + accepted, round)
    return Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], token))


def sample_draft_token(
    processed_row: Tensor,  # float32 [vocab_size]
    noise_key: int,
    position: int,
    round: int,
) -> tuple[int, SparseProbs]:
    """Samples a draft token, and returns it with its distribution.

    Rejection sampling and block verification need the distribution. It is the distribution of the row under
    its settings, truncated to the 256 likeliest tokens.
    """
    probs = probabilities(processed_row[None])[0]
    largest, token_ids = probs.topk(min(_LARGEST_SUPPORT, len(probs)))
    largest, token_ids = largest[largest > 0].double(), token_ids[largest > 0]
    largest /= largest.sum()
    token = int(token_ids[_draw(largest, uniform(noise_key, position, round, Purpose.DRAFT))])
    return token, SparseProbs(tuple(token_ids.tolist()), tuple(largest.tolist()))


def _ratios(draft: Draft, target_probs: Tensor) -> list[float]:
    """Returns the target's probability / the draft's probability of each node's token."""
    if len(draft.draft_probs) != len(draft):
        raise ValueError("this verification needs a chain with draft_probs for every node: give them")
    if len(target_probs) != len(draft) + 1:
        raise ValueError(
            f"target_probs has {len(target_probs)} rows: give {len(draft) + 1}, one more than nodes"
        )
    ratios = []
    for node, (token, probs) in enumerate(zip(draft.tokens, draft.draft_probs, strict=True)):
        if token not in probs.token_ids:
            raise ValueError(f"draft_probs[{node}] must hold the drafted token {token}")
        ratios.append(float(target_probs[node, token]) / probs.probs[probs.token_ids.index(token)])
    return ratios


def _leftover(draft: Draft, target_probs: Tensor, length: int, weight: float) -> Tensor:
    """Returns max(weight * target - draft, 0) after ``length`` nodes: float64 [vocab_size]."""
    leftover = weight * target_probs[length].to("cpu", torch.float64)
    if length < len(draft):
        given = draft.draft_probs[length]
        leftover[list(given.token_ids)] -= torch.tensor(given.probs, dtype=torch.float64)
    return leftover.clamp_(min=0.0)


def _draw_own(leftover: Tensor, target_probs: Tensor, noise_key: int, position: int, round: int) -> int:
    """Draws the target's own token at the position."""
    if not leftover.any():  # both distributions are equal up to rounding
        leftover = target_probs.to("cpu", torch.float64)
    return _draw(leftover, uniform(noise_key, position, round, Purpose.RESIDUAL))


def _draw(weights: Tensor, uniform: float) -> int:
    """Returns the index at which the running sum of weights passes ``uniform`` times their total.

    The weight at that index is above 0. It is the largest weight if the total is not finite. If all weights
    are 0, the index is 0. weights: float64 [num_weights].
    """
    running = weights.nan_to_num(nan=0.0).cumsum(dim=0)
    total = float(running[-1])
    if not 0.0 < total < float("inf"):
        return int(weights.nan_to_num(nan=0.0).argmax())
    return int(torch.searchsorted(running, uniform * total, right=True))
