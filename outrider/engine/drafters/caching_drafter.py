"""Drafters with a KV cache of their own, which they compute from the target's hidden states.

The drafter's cache uses the block tables of the target. So a block that the target shares, frees or computes
again is shared, freed or computed again for the drafter too. States are processed before a Draft, and when a
block is full, since other sequences may share that block. Until then the states are buffered, so plain
decoding costs the drafter a pass per block instead of a pass per token.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cache.key_values import KeyValues
from outrider.engine.cache.narrow import type_of_cache
from outrider.engine.choosing.draft_request import DraftedSequence
from outrider.engine.drafters.shared_head import SharedDrafter
from outrider.engine.drafters.target_drafter import CommittedStates
from outrider.engine.drafters.waiting_states import MOST_WAITING, WaitingStates
from outrider.engine.loading.head_checkpoint import TargetShape
from outrider.engine.settings import EngineSettings


class CachingDrafter(SharedDrafter):
    """Shared drafter that caches what it computes from the target's states."""

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._target_shape = TargetShape.of(settings)
        self._max_sequences = settings.max_sequences

    def allocate(self, num_blocks: int) -> None:
        target = self._target
        self._cache = KeyValues(
            dict(enumerate(self.cache_shapes)),
            num_blocks,
            target.settings.block_size,
            type_of_cache(target.settings, target.dtype),
            target.device,
        )
        if self._share[0] == 0:  # only rank 0 knows the sequences
            self._waiting = WaitingStates(
                self._max_sequences,
                target.settings.block_size,
                (len(self.hidden_layers), self._target_shape.hidden_size),
                target.dtype,
                target.device,
            )

    def waiting_bytes(self) -> int:
        target = self._target_shape
        rows = self._max_sequences * MOST_WAITING
        return rows * len(self.hidden_layers) * target.hidden_size * target.dtype.itemsize

    def forget(self, sequence: DraftedSequence) -> None:
        self._waiting.forget(sequence)

    def _states_before(self, committed: Sequence[CommittedStates]) -> Tensor:
        """Returns the drafter's input states at all these tokens: [num_tokens, state_size]."""
        hidden = torch.cat([part.hidden for part in committed])
        # NaN or infinity would stay in the cache, where an attention mask cannot hide it: 0 * NaN is NaN.
        return self._reduced(hidden.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    @abstractmethod
    def _reduced(self, hidden: Tensor) -> Tensor:
        """Projects the target's states to the drafter's input states [num_tokens, state_size].

        hidden: [num_tokens, num_layers, hidden_size].
        """
