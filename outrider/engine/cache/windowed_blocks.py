"""Blocks of layers with a sliding window: a sequence holds only those that its window can still reach.

A block of the cache stands for a range of tokens. While a window reaches these tokens, the block has a block
of a second, smaller pool, in which windowed layers store them. So all layers use the same block tables, and
windowed layers look each block up once more, in ``WindowedBlocks.on_device``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import MAX_NODES
from outrider.engine.cache.blocks import BlockPool
from outrider.engine.inputs.step_input import NO_PAIRS, NO_SLOTS, Move, Numbers, Rows, WindowedChanges
from outrider.engine.sequence import EngineSequence

# Tokens by which a sequence can be rolled back without computing its cache again. A trial of a target drafter
# goes back by 24 tokens.
MARGIN = 32
LEAD = 48  # tokens that a sequence feeds and drafts in a step, usually at most; prompts feed more
KEPT_WINDOWS = 1  # windows per sequence of a step that wait for other sequences with the same prefix


@dataclass(frozen=True)
class WindowedLayers:
    """Layers with a sliding window that is shorter than the context."""

    layers: frozenset[int]
    window: int  # positions, of the layer with the longest window

    @classmethod
    def of(cls, windows: Mapping[int, int | None], context_length: int) -> "WindowedLayers | None":
        """Returns the layers whose window is shorter than the context; None: there are none.

        windows: positions by layer; None: full attention.
        """
        found = {layer: window for layer, window in windows.items() if window and window < context_length}
        return cls(frozenset(found), max(found.values())) if found else None

    def first_place(self, length: int, block_size: int) -> int:
        """Returns the place of the first block that a token after ``length`` tokens can read.

        An assistant of the target sees one position more than the target.
        """
        return max(0, length - self.window - 1) // block_size

    def blocks_of_sequence(self, block_size: int) -> int:
        """Returns the number of blocks that a decoding sequence holds at most."""
        return -(-(self.window + 1 + MARGIN + LEAD) // block_size) + 1

    def least_blocks(self, block_size: int, prefill_chunk: int) -> int:
        """Returns the number of blocks with which any sequence alone can be computed."""
        return -(-(self.window + 1 + MARGIN + prefill_chunk + MAX_NODES) // block_size) + 1


class WindowedBlocks:
    """Pool of blocks of windowed layers, and who holds them.

    Blocks of the pool are published under the digests of their blocks of the cache, and evicted with them or
    before them.
    """

    def __init__(
        self,
        windowed: WindowedLayers,
        num_blocks: int,
        block_size: int,
        num_all_blocks: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            num_blocks: blocks of the pool without its spare block.
            num_all_blocks: blocks of the cache without its spare block.
        """
        self.windowed = windowed
        self.pool = BlockPool(num_blocks)
        self.num_blocks, self._block_size = num_blocks, block_size
        # [num_all_blocks + 1] block of the pool by block of the cache, undefined if no sequence holds it. The
        # spare blocks correspond, and so do all blocks of equal pools.
        self.on_host = np.minimum(np.arange(num_all_blocks + 1), num_blocks)
        self.on_device = torch.from_numpy(self.on_host)
        if device.type != "cpu":
            self.on_device = self.on_device.to(device, torch.int32)
        self._new: dict[int, int] = {}  # entries of the map that the device does not know yet
        self._moves: list[Move] = []  # pending moves
        self._cleared: list[Numbers] = []  # slots to be filled with zeros

    def lacks(self, sequence: EngineSequence, until: int) -> bool:
        """Whether too few blocks are free for the sequence's slots before ``until``."""
        return self._end(until) - sequence.window.end > self.pool.available

    def hold(self, sequence: EngineSequence, until: int) -> None:
        """Gives the sequence blocks for its slots before ``until``, which have blocks of the cache."""
        held, end = sequence.window, self._end(until)
        if end <= held.end:
            return
        last = self._block(sequence, held.end - 1) if held.end > held.first else None
        of = sequence.blocks[held.end : end]
        self.on_host[of] = taken = self.pool.allocate(len(of), last)
        self._new.update(zip(of.tolist(), taken, strict=True))
        held.end = end

    def slide(self, sequence: EngineSequence, ends: Sequence[int]) -> None:
        """Releases the blocks that no later token of the sequence reads.

        ends: lengths at which other sequences may start. The window before each of them is evicted last.
        """
        held = sequence.window
        first = min(self._first(sequence.cached - MARGIN), held.end)
        for place in range(held.first, first):
            is_wanted = any(self._first(end) <= place < end // self._block_size for end in ends)
            self.pool.release(self._block(sequence, place), is_wanted=is_wanted)
        held.first = max(held.first, first)

    def drop(self, sequence: EngineSequence, keep: int) -> None:
        """Releases the blocks after the sequence's first ``keep`` blocks, which it still holds."""
        held = sequence.window
        for place in reversed(range(max(keep, held.first), held.end)):
            self.pool.release(self._block(sequence, place))
        held.end = min(held.end, keep)
        held.first = min(held.first, held.end)

    def reaches(self, sequence: EngineSequence) -> bool:
        """Whether the sequence holds all that the token after its cached tokens reads."""
        return self._first(sequence.cached) >= sequence.window.first

    def starts(self, sequence: EngineSequence, digests: Sequence[bytes]) -> list[bool]:
        """Returns for each further block whether the sequence could continue after its end.

        digests: digests of the blocks after the cached tokens.
        """
        index = sequence.cached // self._block_size
        first, found = sequence.window.first, []  # place after which no block is missing
        for place, digest in enumerate(digests, index):
            if self.pool.find(digest) is None:
                first = place + 1
            found.append(self._first((place + 1) * self._block_size) >= first)
        return found

    def adopt(self, sequence: EngineSequence, digests: Sequence[bytes]) -> None:
        """Adopts published blocks, which follow the blocks of the sequence's cached tokens."""
        held, index = sequence.window, sequence.cached // self._block_size
        end = index + len(digests)
        first = max(held.first, self._first(end * self._block_size))
        for place in range(held.first, min(held.end, first)):
            self.pool.release(self._block(sequence, place))
        for digest in digests[max(0, first - index) :]:
            block = self.pool.find(digest)
            assert block is not None
            self.pool.share(block)
        held.first, held.end = first, end

    def publish(self, sequence: EngineSequence, index: int, digest: bytes) -> None:
        """Publishes a block that the sequence holds, whose block of the cache is published."""
        self.pool.publish(self._block(sequence, index), digest)

    def move(self, sequence: EngineSequence, source: Numbers, target: Numbers) -> None:
        """Queues moves of a sequence's slots, to be made before the next pass."""
        self._moves.append(Move(self._slots(sequence, source), self._slots(sequence, target)))

    def clear(self, sequence: EngineSequence, length: int) -> None:
        """Marks the held slots beyond ``length`` tokens to be filled with zeros."""
        held, size = sequence.window, self._block_size
        places = np.arange(max(length, held.first * size), held.end * size)
        self._cleared.append(self._slots(sequence, places))

    def take_changes(self) -> WindowedChanges:
        """Returns the pending changes, to be made before the next pass."""
        new, self._new = self._new, {}
        moves, self._moves = self._moves, []
        cleared, self._cleared = self._cleared, []
        blocks = np.array([*new.items()], np.int64) if new else NO_PAIRS
        return WindowedChanges(blocks, moves, np.concatenate([NO_SLOTS, *cleared]))

    def make(self, blocks: Numbers) -> None:
        """Enters blocks of the pool: ``WindowedChanges.blocks``."""
        if not len(blocks):
            return
        self.on_host[blocks[:, 0]] = blocks[:, 1]  # at rank 0 they are entered
        if self.on_device.device.type != "cpu":
            places, taken = to_device(torch.from_numpy(blocks.T.copy()), self.on_device.device)
            self.on_device[places] = taken.int()

    def slots_of(self, slots: Rows) -> torch.Tensor:
        """Returns the slots of the pool for slots of the cache: int64 [num_slots]."""
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=self.on_device.device)
        return self.on_device[slots // self._block_size] * self._block_size + slots % self._block_size

    def _first(self, length: int) -> int:
        return self.windowed.first_place(length, self._block_size)

    def _end(self, until: int) -> int:
        return -(-until // self._block_size)

    def _block(self, sequence: EngineSequence, place: int) -> int:
        return int(self.on_host[sequence.blocks[place]])

    def _slots(self, sequence: EngineSequence, places: Numbers) -> Numbers:
        blocks: Numbers = self.on_host[sequence.blocks[places // self._block_size]]
        return blocks * self._block_size + places % self._block_size
