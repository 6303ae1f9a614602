"""Keeps a caller's text that looks like a mark of the model from becoming the mark.

A mark is a token that ends turns, begins thoughts or calls tools. Its text in a message is cut after the
first character by a sign that the caller did not send. The pieces are tokenized separately, so the text stays
text.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any

from gateway.errors import InvalidRequestError

# Unicode reserves these characters (noncharacters) for use inside programs: texts do not need them.
SIGNS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Marks:
    """Texts of tokens that callers must not inject."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """tokens: tokens of a single character cannot be cut, and are left out."""
        texts = sorted(token for token in tokens if len(token) > 1)
        firsts = groupby(texts, key=lambda text: text[0])
        parts = [f"{re.escape(first)}(?={_any_of([text[1:] for text in group])})" for first, group in firsts]
        self._begin = re.compile("|".join(parts)) if parts else None

    def cut(self, value: Any, sign: str) -> Any:
        """Returns the value with every mark in its texts cut, keys of objects included."""
        if self._begin is None:
            return value
        if isinstance(value, str):
            return self._begin.sub(lambda found: found[0] + sign, value)
        if isinstance(value, dict):
            return {self.cut(key, sign): self.cut(part, sign) for key, part in value.items()}
        return [self.cut(part, sign) for part in value] if isinstance(value, list | tuple) else value


def _any_of(texts: list[str]) -> str:
    """Returns a pattern for sorted texts that branches at each character (a trie), so that it fails early."""
    if "" in texts:
        return ""
    branches = [
        re.escape(first) + _any_of([text[1:] for text in group])
        for first, group in groupby(texts, key=lambda text: text[0])
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def free_signs(value: Any, count: int) -> list[str]:
    """Returns signs that occur in no text of the value, neither raw nor as JSON escapes them.

    Raises:
        InvalidRequestError: the value has nearly all signs.
    """
    texts = [*_texts(value)]
    free = (sign for sign in SIGNS if not any(sign in text or spelled(sign) in text for text in texts))
    signs = [*islice(free, count)]
    if len(signs) < count:
        raise InvalidRequestError("messages", "at most 30 of the characters U+FDD0 to U+FDEF are accepted")
    return signs


def spelled(sign: str) -> str:
    """Returns a sign's escape sequence in Python's ``repr`` and in ASCII JSON."""
    return f"\\u{ord(sign):x}"


def raw(text: str, sign: str) -> str:
    """Returns the text with the sign in place of its escape sequences, which a template may write."""
    return re.sub(rf"\\+u{ord(sign):x}", sign, text) if spelled(sign) in text else text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
