"""A training text in two parts."""

from typing import NamedTuple


class Document(NamedTuple):
    """A prompt and what follows it; held-out prompts are told from training text by their first part."""

    prompt: str
    continuation: str
