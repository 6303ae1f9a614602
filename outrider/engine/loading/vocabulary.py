"""Compares the vocabularies of draft and target: a token id must mean the same token to both."""

from transformers import AutoTokenizer

from outrider.engine.errors import VocabularyMismatchError


def check_vocabulary(target: str, draft: str) -> None:
    """Compares the tokenizers of two checkpoints, folders or hub ids. Padding of embeddings is ignored.

    Raises:
        VocabularyMismatchError: a token has different ids, or only one of the tokenizers knows it.
    """
    of_target = AutoTokenizer.from_pretrained(target).get_vocab()
    of_draft = AutoTokenizer.from_pretrained(draft).get_vocab()
    if of_target == of_draft:
        return
    token = min(
        token for token in of_target.keys() | of_draft.keys() if of_target.get(token) != of_draft.get(token)
    )
    raise VocabularyMismatchError(
        f"draft {draft!r} ({len(of_draft)} tokens) and target {target!r} ({len(of_target)} tokens) have "
        f"different vocabularies: {token!r} is {of_draft.get(token, 'unknown')} to the draft and "
        f"{of_target.get(token, 'unknown')} to the target; choose a draft with the target's tokenizer"
    )
