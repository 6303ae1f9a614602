"""Special tokens of a checkpoint: ends of sequence, and the mask token of a parallel draft model."""

from typing import Any

from outrider.decoding.checkpoint_files import end_of_text, read_json
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.text_part import served_config


def end_of_sequence(model: Any, source: str) -> frozenset[int]:
    """Returns the token ids that end a generation, from all files of the checkpoint.

    A fine-tuned model often names its end of turn in only one file, for example in the tokenizer's.

    Args:
        model: model as transformers has loaded it.
        source: local folder or hub id.
    """
    config = read_json(source, "config.json")
    text_config = config.get("text_config") or {}
    given = [model.generation_config.eos_token_id, end_of_text(source)]
    given += [config.get("eos_token_id"), text_config.get("eos_token_id")]
    if not any(end is not None for end in given):
        given.append(model.config.get_text_config().eos_token_id)  # default of the architecture
    ends = (end for end in given if end is not None)
    ids = {token for end in ends for token in ([end] if isinstance(end, int) else end)}
    return frozenset(token for token in ids if token < model.config.get_text_config().vocab_size)


def drafts_in_parallel(model: str) -> bool:
    """Whether a checkpoint, a folder or hub id, drafts several tokens in one pass.

    Raises:
        UnsupportedModelError: the vocabulary lacks the mask token that the config names.
    """
    return mask_token(served_config(model)) is not None


def mask_token(config: Any) -> int | None:
    """Returns the token that a parallel draft model is fed for each drafted position; None: another model.

    Raises:
        UnsupportedModelError: the vocabulary lacks the token that the config names.
    """
    token = getattr(config, "pard_token", None)
    vocab_size = config.get_text_config().vocab_size
    if token is None or (isinstance(token, int) and 0 <= token < vocab_size):
        return token
    raise UnsupportedModelError(f"pard_token={token!r} of the config must be 0 to {vocab_size - 1}")
