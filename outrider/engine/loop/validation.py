"""Checks of work against its model and sequence; an error names field, value and accepted values."""

from collections.abc import Collection

from outrider.decoding.draft import MAX_NODES, Draft
from outrider.decoding.settings import Sampling, Verification
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Audit, Decode, Propose, Score, Work
from outrider.pace.settings import MAX_DEPTH

MAX_ALTERNATIVES = 256


def check_sampling(sampling: Sampling, vocab_size: int, end_token_ids: Collection[int]) -> None:
    """Checks sampling settings against the vocabulary.

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
    """Checks work against its sequence and the vocabulary.

    Raises:
        ValueError: the work contradicts its sequence or the vocabulary.
    """
    length = work.base + len(work.tokens)
    if not 0 <= work.base <= len(sequence.tokens):
        raise ValueError(f"base={work.base} must be 0 to {len(sequence.tokens)}, the length held here")
    if length < max(1, sequence.prompt_length):
        raise ValueError(f"base + tokens={length} must cover the prompt of {sequence.prompt_length} tokens")
    _check_ids("tokens", work.tokens, vocab_size)
    if isinstance(work, Propose):
        _check_asked(work.depth, work.alternatives)
    elif isinstance(work, Score):
        if not 1 <= work.start < length:
            raise ValueError(
                f"start={work.start} must be 1 to {length - 1}, the position of a committed token"
            )
    elif isinstance(work, Audit):
        if not 1 <= sequence.prompt_length < length <= sequence.limit:
            raise ValueError(
                f"base + tokens={length} must be {sequence.prompt_length + 1} to {sequence.limit}: a prompt"
                " of a token or more, and an answer within max_tokens and the context"
            )
        return
    else:
        _check_draft(work.draft, sequence.sampling.verification, vocab_size)
        if work.lease is not None:
            _check_asked(work.lease.depth, work.lease.alternatives)
        if work.round == sequence.target.round:
            _check_continues(sequence, work)
            return
        if work.is_plain and work.lease is not None and work.lease.until <= length:
            raise ValueError(f"until={work.lease.until} of the lease must be above base + tokens={length}")
    if not isinstance(work, Propose) and length >= sequence.limit:
        raise ValueError(f"base + tokens={length} must be below {sequence.limit}, where the generation ends")


def _check_asked(depth: int, alternatives: int) -> None:
    """Checks the requested size of a Draft."""
    if not 0 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth={depth} must be 0 to {MAX_DEPTH}")
    if not 0 <= alternatives <= MAX_ALTERNATIVES:
        raise ValueError(f"alternatives={alternatives} must be 0 to {MAX_ALTERNATIVES}")


def _check_continues(sequence: EngineSequence, work: Decode) -> None:
    """Checks that a Decode of the current round agrees with the tokens and the mode of the sequence."""
    if tuple(sequence.tokens[work.base : work.base + len(work.tokens)]) != work.tokens:
        raise ValueError(f"tokens from base={work.base} on must be those that the sequence has here")
    if work.draft and sequence.target.is_plain:
        raise ValueError(f"round={work.round} is one of plain decoding: a Draft must come with another round")


def _check_draft(draft: Draft, rule: Verification, vocab_size: int) -> None:
    if len(draft) > MAX_NODES:
        raise ValueError(f"draft: {len(draft)} nodes, at most {MAX_NODES} are verified")
    if rule == "coupled":
        return
    if not draft.is_chain or len(draft.draft_probs) != len(draft):
        raise ValueError(f"draft: verification={rule!r} needs a chain with draft_probs for each node")
    for token, probs in zip(draft.tokens, draft.draft_probs, strict=True):
        probs.check(token, vocab_size)


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raises ValueError if an id is outside the vocabulary."""
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{field}: token id {token} must be 0 to {vocab_size - 1}, the model's vocabulary"
            )
