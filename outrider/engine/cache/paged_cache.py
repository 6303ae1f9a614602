"""Paged cache: keys and values of every layer in blocks, and the blocks of each sequence."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import MAX_NODES, ROOT
from outrider.engine.cache.blocks import BlockPool
from outrider.engine.cache.kept_states import KeptStates
from outrider.engine.cache.memory import zeros
from outrider.engine.cache.narrow import Scales, codes_of, widened
from outrider.engine.cache.recurrent_states import RecurrentStates
from outrider.engine.held_state import MOST_NODES
from outrider.engine.inputs.step_input import NO_PAIRS, Changes, Move, Numbers, Rows
from outrider.engine.sequence import EngineSequence

NO_SCALES: Mapping[int, Scales] = MappingProxyType({})
# Key/value heads, key dimension, value dimension, which is 0 if a value is a part of its key.
LayerShape = tuple[int, int, int]

logger = logging.getLogger(__name__)


class GatherSpace:
    """Memory into which scattered blocks are copied, reused by every layer and step.

    Fresh memory would take several times as long as the copy, since its pages have to be mapped first.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._memory: torch.Tensor | None = None

    def gather(self, stored: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the blocks, [num_blocks * block_size, kv_heads, dim], until the next call.

        Args:
            stored: [slots, kv_heads, dim].
            blocks: int64 [num_blocks].
        """
        rows = stored.view(stored.shape[0] // self._block_size, -1)
        size = len(blocks) * rows.shape[1]
        if self._memory is None or len(self._memory) < size:
            self._memory = stored.new_empty(2 * size)
        copied = self._memory[:size].view(len(blocks), -1)
        torch.index_select(rows, 0, blocks, out=copied)
        return copied.view(-1, *stored.shape[1:])


class KeyValues:
    """Storage of the KV cache: ``keys[layer]`` and ``values[layer]`` are [slots, kv_heads, dim]."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, Scales] = NO_SCALES,
    ) -> None:
        """
        Args:
            num_blocks: number of blocks without the spare block, to which padding is written.
            scales: scales of layers in a narrow cache; the scales of other layers are 1.
        """
        self.block_size = block_size
        self.states: RecurrentStates | None = None  # states of recurrent layers, if the model has any
        self.scales = dict.fromkeys(shapes, Scales()) | dict(scales)
        self.key_space, self.value_space = GatherSpace(block_size), GatherSpace(block_size)
        self.spare_block = num_blocks
        slots = (num_blocks + 1) * block_size
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._stored: list[torch.Tensor] = []  # [layers, slots, kv_heads, dim] of layers of one shape
        for shape in dict.fromkeys(shapes.values()):
            heads, *dims = shape
            layers = [layer for layer, own in shapes.items() if own == shape]
            for of_layer, dim in zip((self.keys, self.values), dims, strict=True):
                if dim:
                    stored = zeros((len(layers), slots, heads, dim), dtype, device)
                    self._stored.append(stored)
                else:
                    stored = torch.empty((len(layers), slots, heads, 0), dtype=dtype, device=device)
                of_layer.update(zip(layers, stored, strict=True))


class PagedCache(KeyValues):
    """Storage and bookkeeping of cached tokens."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, Scales] = NO_SCALES,
        states: RecurrentStates | None = None,
    ) -> None:
        """
        Args:
            states: states of recurrent layers. With them a prefix is shared only up to a kept state.
        """
        super().__init__(shapes, num_blocks, block_size, dtype, device, scales)
        self.states = states
        # A kept state is useless without its block, so they are evicted together, later blocks first.
        self.pool = BlockPool(num_blocks, None if states is None else states.kept.drop)
        self._moves: list[Move] = []  # pending moves
        self._cleared: list[Numbers] = []  # slots to be filled with zeros

    @property
    def capacity(self) -> int:
        """Returns the number of tokens that fit, over all sequences."""
        return self.pool.num_blocks * self.block_size

    @property
    def most_nodes(self) -> int:
        """Returns the largest number of nodes of a Draft that can be cached."""
        return MAX_NODES if self.states is None else MOST_NODES

    def blocks_for(self, length: int) -> int:
        """Returns the number of blocks that ``length`` tokens fill."""
        return -(-length // self.block_size)

    def reserve(self, sequence: EngineSequence, length: int) -> bool:
        """Gives the sequence blocks for ``length`` slots. Returns False if too few are free.

        With its first blocks it also gets a slot for its recurrent states. Later passes will store the states
        that are worth keeping.
        """
        missing = -(-length // self.block_size) - sequence.blocks.count
        if missing > 0:
            if missing > self.pool.available:
                return False
            if self.states is not None and not self.states.hold(sequence.state):
                return False
            last = int(sequence.blocks[-1]) if sequence.blocks else None
            sequence.blocks.push(self.pool.allocate(missing, last))
        if self.states is not None:
            for tokens in (self._prompt_end(sequence), sequence.state.branch, len(sequence.tokens)):
                self._keep_state(sequence, tokens // self.block_size)
        return True

    def release(self, sequence: EngineSequence) -> None:
        """Frees all blocks and states that the sequence holds."""
        self._drop_blocks(sequence, 0)

    def discard(self, sequence: EngineSequence) -> None:
        """Releases a cache with numbers that are not finite, and clears it so that no sequence reads them."""
        self.clear(sequence, len(sequence.digests) * self.block_size)
        self.release(sequence)

    def clear(self, sequence: EngineSequence, length: int) -> None:
        """Marks the slots of its blocks beyond ``length`` tokens to be filled with zeros.

        An attention mask does not hide numbers that are not finite: 0 times such a number is NaN.
        """
        places = np.arange(length, len(sequence.blocks) * self.block_size)
        self._cleared.append(self._slots(sequence, places))

    def adopt_prefix(self, sequence: EngineSequence) -> None:
        """Adopts published blocks for the sequence's next tokens. The last token is always computed.

        With recurrent states it adopts blocks only up to the last kept state, and starts from a copy of it.
        """
        index, rest = divmod(sequence.cached, self.block_size)
        if rest or sequence.pending:
            return
        known = end = index  # leading blocks that are published, and that can be adopted
        while known < self._adoptable(sequence):
            digest = self._digest(sequence, known)
            if self.pool.find(digest) is None:
                break
            known += 1
            if self.states is None or digest in self.states.kept:
                end = known
        sequence.state.branch = known * self.block_size
        if end == index:
            return
        self._drop_blocks(sequence, index)  # blocks that were reserved, but not written yet
        if self.states is not None:
            if not self.states.hold(sequence.state):
                return
            self.states.resume(sequence.state, self._digest(sequence, end - 1), end * self.block_size)
        for digest in sequence.hashes[index:end]:
            block = self.pool.find(digest)
            assert block is not None
            self.pool.share(block)
            sequence.blocks.push([block])
            sequence.digests.append(digest)
        sequence.cached = end * self.block_size
        logger.debug("sequence %d shares %d blocks", sequence.number, end)
        if len(sequence.tokens) == sequence.prompt_length and not sequence.preemptions:
            sequence.adopted += (end - index) * self.block_size

    def to_be_published(self, sequence: EngineSequence) -> list[bytes]:
        """Returns the digests of the blocks that its tokens will fill, the next block first."""
        first = sequence.cached // self.block_size
        return [self._digest(sequence, index) for index in range(first, self._adoptable(sequence))]

    def will_share(self, digests: Sequence[bytes], computed: Mapping[bytes, EngineSequence]) -> bool:
        """Whether a sequence that needs these blocks next can adopt blocks that other sequences will fill.

        With recurrent states, it also marks the state at the end of the last common block to be kept.

        Args:
            digests: what ``to_be_published`` returned.
            computed: other sequences by the digests of the blocks that they will fill.
        """
        if self.states is None:
            return bool(digests) and digests[0] in computed
        last = next((digest for digest in reversed(digests) if digest in computed), None)
        if last is None:
            return False
        other = computed[last]
        return self._keep_state(other, 1 + other.hashes.index(last))

    def _keep_state(self, sequence: EngineSequence, blocks: int) -> bool:
        """Marks the state at the end of ``blocks`` leading blocks to be kept.

        Returns False if no later pass computes that state, or if there is no place for it.
        """
        assert self.states is not None
        held, kept, length = sequence.state, self.states.kept, blocks * self.block_size
        if length in held.ends:
            return True
        if not max(held.lengths) < length <= len(sequence.tokens):
            return False
        if self._digest(sequence, blocks - 1) in kept:
            return True
        if length > self._prompt_end(sequence) and held.newest is not None:
            kept.drop(held.newest)
            held.newest = None
        place = kept.lend()
        if place is not None:
            held.ends[length] = place
        return place is not None

    def _prompt_end(self, sequence: EngineSequence) -> int:
        """Returns the number of its prompt's tokens that another sequence with this prompt could share."""
        return (sequence.prompt_length - 1) // self.block_size * self.block_size

    def _adoptable(self, sequence: EngineSequence) -> int:
        """Returns the number of blocks that another sequence with the same tokens could share."""
        return (len(sequence.tokens) - 1) // self.block_size

    def publish(self, sequence: EngineSequence) -> None:
        """Publishes the full blocks of committed tokens and the stored states, but no drafted tokens."""
        for index in range(len(sequence.digests), sequence.cached // self.block_size):
            digest = self._digest(sequence, index)
            sequence.digests.append(digest)
            self.pool.publish(int(sequence.blocks[index]), digest)
        if self.states is not None:
            self._publish_states(sequence, self.states.kept)

    def _publish_states(self, sequence: EngineSequence, kept: KeptStates) -> None:
        held = sequence.state
        for length in sorted(end for end in held.stored if end <= sequence.cached):
            held.stored.remove(length)
            digest = sequence.digests[length // self.block_size - 1]
            kept.publish(digest, held.ends.pop(length))
            if length > self._prompt_end(sequence):
                held.newest = digest

    def roll_back(self, sequence: EngineSequence, length: int) -> None:
        """Forgets the cached tokens beyond ``length``, and all pending nodes.

        A published block is never overwritten: other tokens go into another block. If no recurrent state is
        left from which the sequence could continue, all of its cache is dropped.
        """
        sequence.forget_pending()
        del sequence.hashes[length // self.block_size :]
        sequence.cached = min(sequence.cached, length)
        if sequence.cached < len(sequence.digests) * self.block_size:
            self._drop_blocks(sequence, sequence.cached // self.block_size)
        if self.states is not None:
            self.states.forget_after(sequence.state, sequence.cached)
            self._check_state(sequence)

    def keep_path(self, sequence: EngineSequence, path: tuple[int, ...], *, has_moved: bool = False) -> None:
        """Commits the pending nodes of ``path``, root first, and moves their cache up; forgets other nodes.

        has_moved: whether the device has moved their cache already.
        """
        if path:
            if not has_moved:
                self._move(sequence, path)
            sequence.cached += len(path)
        sequence.forget_pending()
        if self.states is not None:
            self._check_state(sequence)

    def keep_branch(self, sequence: EngineSequence, path: tuple[int, ...]) -> None:
        """Commits a path as ``keep_path`` does, but keeps the nodes that follow the path pending."""
        last = path[-1] if path else ROOT
        below = sequence.pending.below(last)
        self._move(sequence, (*path, *below))
        sequence.cached += len(path)
        index = {last: ROOT} | {node: place for place, node in enumerate(below)}
        sequence.pending = sequence.pending.part(last, below)
        sequence.draft.top_tokens = {
            index[node]: top_tokens for node, top_tokens in sequence.draft.top_tokens.items() if node in index
        }

    def shrink(self, sequence: EngineSequence) -> None:
        """Frees the blocks that only pending nodes fill."""
        self._drop_blocks(sequence, self.blocks_for(sequence.cached))

    def take_changes(self) -> Changes:
        """Returns the pending changes, which the caller makes before the next forward pass."""
        moves, self._moves = self._moves, []
        cleared, self._cleared = self._cleared, []
        of_states = ([], NO_PAIRS) if self.states is None else self.states.take_changes()
        return Changes(moves, np.concatenate([np.zeros(0, np.int64), *cleared]), *of_states)

    def make(self, changes: Changes) -> None:
        """Applies the changes. Any number of moves takes few kernel launches."""
        if self.states is not None:
            self.states.make(changes)
        moves, cleared = changes.moves, changes.cleared
        if not moves and not len(cleared):
            return
        move = composed(moves)
        slots = np.concatenate([move.source, move.target, cleared])
        sizes = [len(move.source), len(move.target), len(cleared)]
        moved = to_device(torch.from_numpy(slots), self._stored[0].device)
        source, target, emptied = moved.split_with_sizes(sizes)
        if len(target):
            self.move(source, target)
        for stored in self._stored if len(emptied) else ():
            codes_of(stored).index_fill_(1, emptied, 0)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies slots in one operation: int64 [num_slots] on the device, with distinct targets."""
        for stored in self._stored:
            stored[:, target] = stored[:, source]

    def are_finite(self, slots: Rows) -> torch.Tensor:
        """Returns bool [num_slots]: whether every key and value there is finite, in all layers."""
        # A maximum is NaN if any number is NaN, and reads each number once.
        parts = [widened(stored[:, slots], torch.float32) for stored in self._stored]
        largest = [part.abs().amax(dim=(0, 2, 3)) for part in parts]
        return torch.stack([part.float() for part in largest]).amax(dim=0).isfinite()

    def _move(self, sequence: EngineSequence, nodes: tuple[int, ...]) -> None:
        """Moves the kept pending nodes to the slots after the committed tokens."""
        if nodes and nodes[-1] != len(nodes) - 1:  # nodes ascend, so these have a gap
            start = sequence.cached
            source, target = start + np.asarray(nodes), start + np.arange(len(nodes))
            self._moves.append(Move(self._slots(sequence, source), self._slots(sequence, target)))
            if self.states is not None:
                self.states.move(sequence.state, source, target)

    def _check_state(self, sequence: EngineSequence) -> None:
        """Drops a sequence's whole cache if it cannot continue from any of its recurrent states."""
        if not sequence.state.resumes_at(sequence.cached):
            self._drop_blocks(sequence, 0)

    def _slots(self, sequence: EngineSequence, places: Numbers) -> Numbers:
        blocks: Numbers = sequence.blocks[places // self.block_size]
        return blocks * self.block_size + places % self.block_size

    def _digest(self, sequence: EngineSequence, index: int) -> bytes:
        """Returns the digest of the block's tokens, of all tokens before them, and of the adapter."""
        while len(sequence.hashes) <= index:
            first = len(sequence.hashes) * self.block_size
            tokens = np.asarray(sequence.tokens[first : first + self.block_size], np.int64).tobytes()
            before = sequence.hashes[-1] if sequence.hashes else sequence.adapter.digest
            sequence.hashes.append(hashlib.blake2b(before + tokens, digest_size=16).digest())
        return sequence.hashes[index]

    def _drop_blocks(self, sequence: EngineSequence, keep: int) -> None:
        # Reversed, so that later blocks of a prefix are evicted before earlier blocks.
        for block in reversed(sequence.blocks.drop(keep)):
            self.pool.release(block)
        del sequence.digests[keep:]
        sequence.cached = min(sequence.cached, keep * self.block_size)
        sequence.forget_pending()
        if self.states is not None and not keep:
            self.states.release(sequence.state)


def composed(moves: list[Move]) -> Move:
    """Composes moves into a single move, which reads everything before it writes."""
    origins: dict[int, int] = {}  # key: slot; value: slot whose content it gets
    for move in moves:
        read = [origins.get(slot, slot) for slot in move.source.tolist()]
        origins.update(zip(move.target.tolist(), read, strict=True))
    return Move(np.array([*origins.values()], np.int64), np.array([*origins], np.int64))
