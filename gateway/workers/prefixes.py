"""Prefixes of prompts, and the worker that prefilled each: it probably still caches them."""

import hashlib
from array import array
from collections.abc import Iterator

from outrider.learning.lru import Lru

SPAN = 64  # tokens; the lengths of prefixes are multiples of it
REMEMBERED = 65536  # prefixes


class Prefixes:
    """Remembers the newest address for every prefix, and forgets the least recently used prefix."""

    def __init__(self) -> None:
        self._address_of: Lru[bytes, str] = Lru(REMEMBERED)

    def note(self, prompt: tuple[int, ...], address: str) -> None:
        """Records that the worker at ``address`` prefills this prompt."""
        for digest in _beginnings(prompt):
            self._address_of.put(digest, address)

    def holder(self, prompt: tuple[int, ...]) -> str | None:
        """Returns the address of the worker that was last given the longest known prefix of the prompt."""
        address = None
        for digest in _beginnings(prompt):
            if (holder := self._address_of.peek(digest)) is None:
                break
            address = holder
        return address


def _beginnings(prompt: tuple[int, ...]) -> Iterator[bytes]:
    digest, tokens = b"", array("q", prompt)
    for end in range(SPAN, len(prompt) + 1, SPAN):
        span = tokens[end - SPAN : end].tobytes()
        digest = hashlib.blake2b(digest + span, digest_size=16).digest()
        yield digest
