"""Refuses what contradicts the model or the sequence, naming field, value and what would be accepted."""

from collections.abc import Iterable

from decoding.settings import Sampling
from engine.work import Generate, Propose, Verify, Work


def check_sampling(sampling: Sampling, vocab_size: int, end_token_ids: Iterable[int]) -> None:
    """
    Raises:
        ValueError: a token id lies outside the vocabulary, or the settings leave no token to choose.
    """
    allowed = sampling.allowed_token_ids
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("bad_token_ids", sampling.bad_token_ids, vocab_size)
    _check_ids("allowed_token_ids", allowed or (), vocab_size)
    banned = set(sampling.bad_token_ids) | (set(end_token_ids) if sampling.min_tokens else set())
    if not set(range(vocab_size) if allowed is None else allowed) - banned:
        raise ValueError(
            f"bad_token_ids, allowed_token_ids and min_tokens={sampling.min_tokens} leave no token to choose:"
            " allow at least one that does not end the generation"
        )


def check_work(work: Work, vocab_size: int) -> None:
    """
    Raises:
        ValueError: the work contradicts its sequence or the vocabulary.
    """
    sequence, length = work.sequence, work.base + len(work.tokens)
    if not 0 <= work.base <= len(sequence.tokens):
        raise ValueError(f"base={work.base} must be 0 to {len(sequence.tokens)}, the length held here")
    if length < max(1, sequence.prompt_length):
        raise ValueError(f"base + tokens={length} must cover the prompt of {sequence.prompt_length} tokens")
    _check_ids("tokens", work.tokens, vocab_size)
    if isinstance(work, Generate) and work.count < 1:
        raise ValueError(f"count={work.count} must be at least 1")
    if isinstance(work, Propose) and (work.depth < 0 or work.leaves < 0):
        raise ValueError(f"depth={work.depth} and leaves={work.leaves} must be at least 0")
    if isinstance(work, Verify) and sequence.sampling.verification != "coupled":
        draft = work.draft
        if not draft.is_chain or len(draft.draft_probs) != len(draft):
            raise ValueError(
                f"draft: verification={sequence.sampling.verification!r} needs a chain with draft_probs"
                " for each node"
            )
        for token, probs in zip(draft.tokens, draft.draft_probs, strict=True):
            _check_ids("draft_probs", probs.token_ids, vocab_size)
            if token not in probs.token_ids:
                raise ValueError(
                    f"draft_probs: drafted token {token} must be in the support it was drawn from"
                )
    if not isinstance(work, Propose) and length >= sequence.limit:
        raise ValueError(f"base + tokens={length} must be below {sequence.limit}, where the generation ends")


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises the ValueError of the first id outside the vocabulary."""
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"{field}: token id {outside} must be 0 to {vocab_size - 1}, the model's vocabulary")
