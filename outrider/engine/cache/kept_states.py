"""Recurrent states at block ends, from which other sequences with the same prefix can start."""

from collections.abc import Sequence

import torch

from outrider.engine.cache.memory import zeros
from outrider.learning.lru import Lru

# The states of a model are as large as the keys and values of thousands of tokens (3,100 in Qwen3-Next). A
# state after each block would take many times the memory of the blocks. With a state at regular distances, a
# single long prompt would evict all other states. So passes keep only these states:
# - at the end of the last whole block of a prompt: the same prompt, or the next turn, can start there;
# - at the end of the newest block of an answer, replacing the previous state: the next turn contains the
#   answer, and a preempted sequence restarts there. The cost is one copy per block of tokens, which is small:
#   each token reads and writes the state several times;
# - at the position where a sequence branches off from blocks that another sequence has filled or will fill: a
#   prefix that was shared twice will be shared again.
KEPT = 2  # kept states per slot of a sequence: one for its answer, one for a prefix


class KeptStates:
    """Places for kept states. A place is free, lent to a sequence that will store a state, or published.

    A state is published by the digest of the block at whose end it is. An adopted state is copied, so that
    any published state may be evicted.
    """

    def __init__(
        self,
        layers: int,
        state: Sequence[int],
        tail: Sequence[int],
        places: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            layers: number of recurrent layers.
            state: shape of a state.
            tail: shape of a tail, whose type is ``dtype``.
            places: number of states.
        """
        self.all_states = zeros((layers, places, *state), torch.float32, device)
        self.all_tails = zeros((layers, places, *tail), dtype, device)
        self._free = [*reversed(range(places))]
        self._place_of: Lru[bytes, int] = Lru(places)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place_of

    def are_finite(self, places: Sequence[int]) -> torch.Tensor:
        """Returns a bool tensor: whether all numbers at these places are finite."""
        parts = [kept[:, place] for kept in (self.all_states, self.all_tails) for place in places]
        return torch.stack([part.abs().amax().float() for part in parts]).isfinite().all()

    def lend(self) -> int | None:
        """Returns a place for a state; None: all places are lent.

        If no place is free, it evicts the least recently used state.
        """
        if self._free:
            return self._free.pop()
        return self._place_of.evict()[1] if len(self._place_of) else None

    def give_back(self, place: int) -> None:
        """Takes back a lent place without publishing its state."""
        self._free.append(place)

    def publish(self, digest: bytes, place: int) -> None:
        """Publishes the state in a lent place, unless a state with this digest is published."""
        if digest in self._place_of:
            self._free.append(place)
        else:
            self._place_of.put(digest, place)

    def use(self, digest: bytes) -> int:
        """Returns the place of a published state, and marks it as the most recently used."""
        place = self._place_of.peek(digest)
        assert place is not None
        self._place_of.put(digest, place)
        return place

    def drop(self, digest: bytes) -> None:
        """Drops the published state with this digest, if any."""
        if (place := self._place_of.peek(digest)) is not None:
            self._place_of.drop(digest)
            self._free.append(place)
