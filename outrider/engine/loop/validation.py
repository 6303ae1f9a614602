"""Refuses what contradicts the model or the sequence, naming field, value and what would be accepted."""

from collections.abc import Collection

from outrider.decoding.draft import MAX_NODES
from outrider.decoding.settings import Sampling, Verification
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Extend, Generate, Propose, Score, TopUp, Verify, Work
from outrider.pace.settings import MAX_DEPTH

MAX_LEAVES = 256


def check_sampling(sampling: Sampling, vocab_size: int, end_token_ids: Collection[int]) -> None:
    """
    Raises:
        ValueError: a token id lies outside the vocabulary, or the settings leave no token to choose.
    """
    allowed = sampling.allowed_token_ids
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("bad_token_ids", sampling.bad_token_ids, vocab_size)
    _check_ids("allowed_token_ids", allowed or (), vocab_size)
    banned = {*sampling.bad_token_ids, *(end_token_ids if sampling.min_tokens else ())}
    left = vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
    if left <= 0:
        raise ValueError(
            f"bad_token_ids, allowed_token_ids and min_tokens={sampling.min_tokens} leave no token to choose:"
            " allow at least one that does not end the generation"
        )


def check_work(sequence: EngineSequence, work: Work, vocab_size: int) -> None:
    """
    Raises:
        ValueError: the work contradicts its sequence or the vocabulary.
    """
    length = work.base + len(work.tokens)
    if not 0 <= work.base <= len(sequence.tokens):
        raise ValueError(f"base={work.base} must be 0 to {len(sequence.tokens)}, the length held here")
    if length < max(1, sequence.prompt_length):
        raise ValueError(f"base + tokens={length} must cover the prompt of {sequence.prompt_length} tokens")
    _check_ids("tokens", work.tokens, vocab_size)
    if isinstance(work, Generate | TopUp) and work.count < 1:
        raise ValueError(f"count={work.count} must be at least 1")
    if isinstance(work, Propose):
        _check_asked(work.depth, work.leaves)
    if isinstance(work, Score) and not 1 <= work.start < length:
        raise ValueError(f"start={work.start} must be 1 to {length - 1}, the position of a committed token")
    if isinstance(work, Verify | TopUp):
        _check_asked(work.next_depth, work.next_leaves)
    if isinstance(work, Verify | Extend):
        _check_draft(work, sequence.sampling.verification, vocab_size)
    if isinstance(work, Extend | TopUp):
        _check_continues(sequence, work)
    elif not isinstance(work, Propose) and length >= sequence.limit:
        raise ValueError(f"base + tokens={length} must be below {sequence.limit}, where the generation ends")


def _check_asked(depth: int, leaves: int) -> None:
    """Of a Draft."""
    if not 0 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth={depth} must be 0 to {MAX_DEPTH}")
    if not 0 <= leaves <= MAX_LEAVES:
        raise ValueError(f"leaves={leaves} must be 0 to {MAX_LEAVES}")


def _check_continues(sequence: EngineSequence, work: Extend | TopUp) -> None:
    """The sequence goes on from what the sender holds, or has done so."""
    end = work.base + len(work.tokens)
    if isinstance(work, TopUp) and not sequence.is_free and sequence.verified_round is None:
        raise ValueError("a TopUp must follow a Generate or a Verify")
    if isinstance(work, Extend) and sequence.verified_round != work.round:
        raise ValueError(f"round={work.round} of an Extend must be that of the Verify before")
    if tuple(sequence.tokens[work.base : end]) != work.tokens:
        raise ValueError(f"tokens from base={work.base} on must be those that the sequence has here")


def _check_draft(work: Verify | Extend, rule: Verification, vocab_size: int) -> None:
    draft = work.draft
    if len(draft) > MAX_NODES:
        raise ValueError(f"draft: {len(draft)} nodes, at most {MAX_NODES} are verified")
    if rule == "coupled":
        return
    if not draft.is_chain or len(draft.draft_probs) != len(draft):
        raise ValueError(f"draft: verification={rule!r} needs a chain with draft_probs for each node")
    for token, probs in zip(draft.tokens, draft.draft_probs, strict=True):
        probs.check(token, vocab_size)


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raises the ValueError of an id outside the vocabulary."""
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{field}: token id {token} must be 0 to {vocab_size - 1}, the model's vocabulary"
            )
