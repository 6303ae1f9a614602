"""A training text in two parts."""

from typing import NamedTuple


class Document(NamedTuple):
    """Document: a prompt and the text after it. The prompt tells held-out documents from training text."""

    prompt: str
    continuation: str
