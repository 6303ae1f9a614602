"""A training text in two parts."""

from typing import NamedTuple


class Document(NamedTuple):
    """Prompt and the text after it. Held-out documents are recognized by their prompts."""

    prompt: str
    continuation: str
