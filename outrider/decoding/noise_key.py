"""The noise key: what one generation's random numbers hang on. Torch-free: the gateway makes it."""

import hashlib
from array import array
from collections.abc import Sequence

_PERSON = b"outrider.noise"  # domain separation from other uses of the same hash


def noise_key(seed: int, choice: int, prompt: Sequence[int]) -> int:
    """Keyed hash of (seed, choice index, prompt token ids), an unsigned 64-bit integer.

    Two prompts under one seed, and the choices of one request, so get unrelated noise.
    """
    key = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    tokens = array("q", prompt)
    digest = hashlib.blake2b(tokens.tobytes(), key=key, person=_PERSON, digest_size=8)
    return int.from_bytes(digest.digest(), "little")
