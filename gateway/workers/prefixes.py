"""Which worker took in which beginning of a prompt: there it is probably still cached."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

SPAN = 64  # tokens by which beginnings are told apart
REMEMBERED = 65536  # beginnings


class Prefixes:
    """Remembers the newest address for every beginning of whole spans, the least recently used forgotten."""

    def __init__(self) -> None:
        self._address_of: OrderedDict[bytes, str] = OrderedDict()

    def note(self, prompt: tuple[int, ...], address: str) -> None:
        """The worker at ``address`` takes this prompt in."""
        for digest in _beginnings(prompt):
            self._address_of[digest] = address
            self._address_of.move_to_end(digest)
        while len(self._address_of) > REMEMBERED:
            self._address_of.popitem(last=False)

    def holder(self, prompt: tuple[int, ...]) -> str | None:
        """Where the longest known beginning of the prompt was last taken in."""
        address = None
        for digest in _beginnings(prompt):
            if digest not in self._address_of:
                break
            address = self._address_of[digest]
        return address


def _beginnings(prompt: tuple[int, ...]) -> Iterator[bytes]:
    digest, tokens = b"", array("q", prompt)
    for end in range(SPAN, len(prompt) + 1, SPAN):
        span = tokens[end - SPAN : end].tobytes()
        digest = hashlib.blake2b(digest + span, digest_size=16).digest()
        yield digest
