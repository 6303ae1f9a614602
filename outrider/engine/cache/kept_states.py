"""Recurrent states at the ends of blocks, from which other sequences with the same beginning go on."""

from collections.abc import Sequence

import torch

from outrider.engine.cache.memory import zeros
from outrider.learning.lru import Lru

# States of a model are as large as the keys and values of thousands of tokens (3,100 of Qwen3-Next). So a
# state after each block would take many times the memory of the blocks, and one after each stretch would let
# a single long prompt evict all others. These are kept, as their tokens come by:
# - at the end of the last whole block of a prompt: the same prompt again, or the next turn, goes on there;
# - at the end of the newest block of an answer, in place of the state before: the next turn contains the
#   answer, and a preempted sequence goes on there. Storing it costs a copy in each block of tokens, and each
#   token reads and writes the state several times;
# - at the place at which a sequence branches off from blocks that another sequence has filled or will fill:
#   one prefix that was shared twice will be shared again.
KEPT = 2  # kept states for each slot of a sequence: one of its answer, and one of a beginning


class KeptStates:
    """Memory of kept states: free, lent to a sequence whose passes store one, or found by its digest.

    A digest is that of the block that ends there. An adopted state is copied, so any may be evicted.
    """

    def __init__(
        self,
        layers: Sequence[int],
        heads: Sequence[int],
        tail: Sequence[int],
        places: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            heads: shape of a state.
            tail: shape of a tail, whose type is ``dtype``.
            places: number of states.
        """
        self.all_states = zeros((len(layers), places, *heads), torch.float32, device)
        self.all_tails = zeros((len(layers), places, *tail), dtype, device)
        self.states = dict(zip(layers, self.all_states, strict=True))  # [places, *heads] by layer
        self.tails = dict(zip(layers, self.all_tails, strict=True))  # [places, *tail]
        self._free = [*reversed(range(places))]
        self._place_of: Lru[bytes, int] = Lru(places)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place_of

    def are_finite(self, places: Sequence[int]) -> torch.Tensor:
        """Returns a bool: whether all numbers there are finite."""
        parts = [kept[:, place] for kept in (self.all_states, self.all_tails) for place in places]
        return torch.stack([part.abs().amax().float() for part in parts]).isfinite().all()

    def lend(self) -> int | None:
        """Returns a place for a state, the least recently used if none is free; None: all are lent."""
        if self._free:
            return self._free.pop()
        return self._place_of.evict()[1] if len(self._place_of) else None

    def give_back(self, place: int) -> None:
        """Takes back a lent place whose state nobody will look for."""
        self._free.append(place)

    def publish(self, digest: bytes, place: int) -> None:
        """Publishes the state in a lent place, unless there is one with this digest."""
        if digest in self._place_of:
            self._free.append(place)
        else:
            self._place_of.put(digest, place)

    def use(self, digest: bytes) -> int:
        """Returns the place of a state that is there, which is now the most recently used."""
        place = self._place_of.peek(digest)
        assert place is not None
        self._place_of.put(digest, place)
        return place

    def drop(self, digest: bytes) -> None:
        """Forgets a state, if it is there."""
        if (place := self._place_of.peek(digest)) is not None:
            self._place_of.drop(digest)
            self._free.append(place)
