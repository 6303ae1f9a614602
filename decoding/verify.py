"""Verification: which part of a Draft stands, and the target's own next token.

The coupled rule looks at tokens only. The ratio rules (token-wise and block-wise) look at the distributions
that draft and target sampled from, and give the target's distribution, but not the same text per noise key.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.draft import ROOT, Draft, SparseProbs, Verdict
from decoding.noise import Purpose, gumbel, gumbel_at, streams, uniform

_LARGEST_SUPPORT = 256  # of a draft's distribution under the ratio rules, so that the message stays small


def verify_coupled(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Follows the target's own tokens through the Draft, a tree or a chain, as long as they were drafted.

    ``chosen[0]`` is the target's token after the last committed one, ``chosen[1 + node]`` its token after
    that node. Source: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
    speculative decoding", 2024.

    Raises:
        ValueError: not one token for the root and each node.
    """
    if len(chosen) != len(draft) + 1:
        raise ValueError(
            f"chosen has {len(chosen)} tokens: give {len(draft) + 1}, the root's and one per node"
        )
    accepted: list[int] = []
    node, token = ROOT, chosen[0]
    tokens = [token]
    while (child := draft.child(node, token)) is not None:
        node, token = child, chosen[1 + child]
        accepted.append(node)
        tokens.append(token)
    return Verdict(tuple(accepted), tuple(tokens))


def verify_rejection(
    draft: Draft,
    target_probs: Tensor,  # [len(draft) + 1, vocab_size], row i after i drafted tokens
    noise_key: int,
    position: int,  # of the first drafted token
    round: int,
) -> Verdict:
    """Accepts each drafted token with probability target_probs / draft_probs, up to the first refusal.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, algorithm 1;
    Chen et al., "Accelerating large language model decoding with speculative sampling", 2023, algorithm 2.

    Raises:
        ValueError: the Draft is not a chain with draft_probs, or target_probs has another number of rows.
    """
    probs = _checked(draft, target_probs)
    accepted = 0
    for token, draft_probs in zip(draft.tokens, draft.draft_probs, strict=True):
        ratio = float(probs[accepted, token]) / _prob_of(draft_probs, token)
        if not uniform(noise_key, position + accepted, round, Purpose.ACCEPT) < ratio:
            break
        accepted += 1
    leftover = probs[accepted]
    if accepted < len(draft):
        leftover = (leftover - _dense(draft.draft_probs[accepted], leftover)).clamp_(min=0.0)
    return _verdict(draft, accepted, leftover, noise_key, position, round)


def verify_block(
    draft: Draft,
    target_probs: Tensor,  # [len(draft) + 1, vocab_size], row i after i drafted tokens
    noise_key: int,
    position: int,  # of the first drafted token
    round: int,
) -> Verdict:
    """Accepts the longest prefix that stands as a block: on average no fewer tokens than verify_rejection.

    Source: Sun et al., "Block verification accelerates speculative decoding", 2024, algorithm 2.

    Raises:
        ValueError: the Draft is not a chain with draft_probs, or target_probs has another number of rows.
    """
    probs = _checked(draft, target_probs)
    weight = 1.0  # of the prefix looked at: the paper's p_i
    accepted, residual = 0, probs[0]
    for length in range(len(draft) + 1):
        if length > 0:
            token = draft.tokens[length - 1]
            ratio = float(probs[length - 1, token]) / _prob_of(draft.draft_probs[length - 1], token)
            weight = min(1.0, weight * ratio)
        if length == len(draft):
            accept, leftover = weight, probs[length]
        else:
            leftover = (weight * probs[length] - _dense(draft.draft_probs[length], probs[length])).clamp_(
                min=0.0
            )
            mass = float(leftover.sum())
            accept = mass / (mass + 1.0 - weight) if mass > 0.0 else 0.0
        if length == 0 or uniform(noise_key, position + length - 1, round, Purpose.ACCEPT) < accept:
            accepted, residual = length, leftover
    return _verdict(draft, accepted, residual, noise_key, position, round)


def sample_draft_token(
    processed_row: Tensor,  # float32 [vocab_size]
    noise_key: int,
    position: int,
    round: int,
) -> tuple[int, SparseProbs]:
    """A token for the ratio rules, and the distribution it was really drawn from.

    That is the row's distribution under its settings, cut to its 256 likeliest tokens.
    """
    probs = processed_row.softmax(dim=0)
    largest, token_ids = probs.topk(min(_LARGEST_SUPPORT, len(probs)))
    token_ids, largest = token_ids[largest > 0], largest[largest > 0]
    largest /= largest.sum()
    row_streams = streams([noise_key], [position], [round], Purpose.DRAFT, probs.device)
    noise = gumbel_at(row_streams, torch.zeros_like(token_ids), token_ids)
    token = int(token_ids[int(noise.add_(largest.log()).argmax())])
    return token, SparseProbs(tuple(token_ids.tolist()), tuple(largest.tolist()))


def _checked(draft: Draft, target_probs: Tensor) -> Tensor:
    """target_probs, float64 on the CPU, where single elements are cheap to read."""
    if not draft.is_chain or len(draft.draft_probs) != len(draft):
        raise ValueError("the ratio rules verify chains with draft_probs for each node: use the coupled rule")
    if len(target_probs) != len(draft) + 1:
        raise ValueError(
            f"target_probs has {len(target_probs)} rows: give {len(draft) + 1}, one more than nodes"
        )
    return target_probs.to("cpu", torch.float64)


def _prob_of(probs: SparseProbs, token: int) -> float:
    for token_id, prob in zip(probs.token_ids, probs.probs, strict=True):
        if token_id == token:
            return prob
    raise ValueError(f"draft_probs hold no probability for the drafted token {token}")


def _dense(probs: SparseProbs, like: Tensor) -> Tensor:
    """float64 [vocab_size]"""
    dense = torch.zeros_like(like)
    dense[list(probs.token_ids)] = torch.tensor(probs.probs, dtype=like.dtype)
    return dense


def _verdict(
    draft: Draft, accepted: int, weights: Tensor, noise_key: int, position: int, round: int
) -> Verdict:
    """The accepted prefix and one more token, drawn in proportion to the weights."""
    row_streams = streams([noise_key], [position + accepted], [round], Purpose.RESIDUAL)
    perturbed = weights.log() + gumbel(row_streams, len(weights))[0]
    return Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], int(perturbed.argmax())))
