"""Validation of a Draft that a worker sent."""

from outrider.decoding.draft import MAX_NODES, Draft
from outrider.decoding.settings import Verification
from protos import rounds_pb2
from protos.conversions import draft_from_message


def received_draft(message: rounds_pb2.Draft, rule: Verification, vocab_size: int) -> Draft:
    """Returns the Draft, after checks for all that would make a target refuse it and so end the request.

    It runs once per round, so it must be fast.

    Args:
        vocab_size: number of token ids that all workers know.

    Raises:
        ValueError: a target would refuse the Draft; the message says why.
    """
    tokens = message.tokens
    if len(tokens) > MAX_NODES:
        raise ValueError(f"the Draft has {len(tokens)} nodes, at most {MAX_NODES} are taken")
    if max(tokens, default=0) >= vocab_size:
        raise ValueError(f"the Draft has token {max(tokens)}, not all workers know it")
    try:
        draft = draft_from_message(message)
        for token, support in zip(draft.tokens, draft.draft_probs, strict=False):
            support.check(token, vocab_size)
    except ValueError as error:
        raise ValueError(f"the Draft is malformed: {error}") from error
    if rule == "coupled" and draft.draft_probs:
        raise ValueError(f"the Draft has draft_probs, which {rule!r} does not ask for")
    if rule != "coupled" and len(draft.draft_probs) != len(draft):
        raise ValueError(f"the Draft has no draft_probs, as {rule!r} needs them")
    return draft
