"""Paged cache: keys and values of every layer in blocks, and the blocks of each sequence."""

import hashlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import MAX_NODES, ROOT
from outrider.engine.cache.blocks import BlockPool
from outrider.engine.cache.kept_states import KeptStates
from outrider.engine.cache.key_values import NO_SCALES, KeyValues, LayerShape
from outrider.engine.cache.narrow import Scales, codes_of
from outrider.engine.cache.recurrent_states import RecurrentStates
from outrider.engine.cache.windowed_blocks import WindowedBlocks
from outrider.engine.held_state import MOST_NODES
from outrider.engine.inputs.step_input import NO_PAIRS, NO_SLOTS, NO_WINDOWED_CHANGES, Changes, Move, Numbers
from outrider.engine.sequence import EngineSequence

logger = logging.getLogger(__name__)


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
        windows: WindowedBlocks | None = None,
    ) -> None:
        """
        Args:
            states: states of recurrent layers. With them a prefix is shared only up to a kept state.
            windows: pool of windowed layers. With it a prefix is shared only up to a place before which the
                pool has a whole window.
        """
        super().__init__(shapes, num_blocks, block_size, dtype, device, scales, windows)
        self.states = states
        self.pool = BlockPool(num_blocks, self._evicted)
        self._moves: list[Move] = []  # pending moves
        self._cleared: list[Numbers] = []  # slots to be filled with zeros

    @property
    def capacity(self) -> int:
        """Returns the number of tokens that fit, over all sequences."""
        return self.pool.num_blocks * self.block_size

    @property
    def fullest_pool(self) -> BlockPool:
        """Returns the pool with the smallest share of available blocks."""
        pools = [self.pool] if self.windows is None else [self.pool, self.windows.pool]
        return min(pools, key=lambda pool: pool.share_available)

    @property
    def most_nodes(self) -> int:
        """Returns the largest number of nodes of a Draft that can be cached."""
        return MAX_NODES if self.states is None else MOST_NODES

    def blocks_for(self, length: int) -> int:
        """Returns the number of blocks that ``length`` tokens fill."""
        return -(-length // self.block_size)

    def room(self, sequence: EngineSequence) -> int:
        """Returns the number of slots that the sequence may write, in all layers."""
        held = len(sequence.blocks) if self.windows is None else sequence.window.end
        return held * self.block_size

    def reserve(self, sequence: EngineSequence, length: int, budget: int | None = None) -> bool:
        """Gives the sequence blocks for ``length`` slots. Returns False if too few are free.

        With its first blocks it also gets a slot for its recurrent states. Later passes will store the states
        that are worth keeping.

        budget: tokens of a prompt that the next pass may feed, the only tokens for which windowed layers get
            blocks; None: the pass writes up to ``length``.
        """
        missing = -(-length // self.block_size) - sequence.blocks.count
        until = length
        if self.windows is not None:
            left = len(sequence.tokens) - sequence.cached
            if budget is not None and left > max(budget, self.block_size):
                until = sequence.cached + budget
            if self.windows.lacks(sequence, until):
                return False
        if missing > 0:
            if missing > self.pool.available:
                return False
            if self.states is not None and not self.states.hold(sequence.state):
                return False
            last = int(sequence.blocks[-1]) if sequence.blocks else None
            sequence.blocks.push(self.pool.allocate(missing, last))
        if self.windows is not None:
            self.windows.hold(sequence, until)
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
        if self.windows is not None:
            self.windows.clear(sequence, length)

    def adopt_prefix(self, sequence: EngineSequence) -> None:
        """Adopts published blocks for the sequence's next tokens. The last token is always computed.

        With recurrent states it adopts blocks only up to the last kept state, and starts from a copy of it.
        With windowed layers it adopts blocks only up to a place before which a whole window is published.
        """
        index, rest = divmod(sequence.cached, self.block_size)
        if rest or sequence.pending:
            return
        known = index  # leading blocks that are published
        while known < self._adoptable(sequence) and self.pool.find(self._digest(sequence, known)) is not None:
            known += 1
        sequence.state.branch = known * self.block_size
        end = self._last_start(sequence, index, known)
        if end == index:
            return
        self._drop_blocks(sequence, index)  # blocks that were reserved, but not written yet
        if self.states is not None:
            if not self.states.hold(sequence.state):
                return
            self.states.resume(sequence.state, self._digest(sequence, end - 1), end * self.block_size)
        if self.windows is not None:
            self.windows.adopt(sequence, sequence.hashes[index:end])
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

    def _last_start(self, sequence: EngineSequence, index: int, known: int) -> int:
        """Returns the number of leading blocks, up to ``known``, after which the sequence could continue.

        index: number of leading blocks that it holds.
        """
        digests = sequence.hashes[index:known]
        starts = [True] * len(digests) if self.windows is None else self.windows.starts(sequence, digests)
        last = index
        for end, (digest, is_start) in enumerate(zip(digests, starts, strict=True), index + 1):
            if is_start and (self.states is None or digest in self.states.kept):
                last = end
        return last

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
            self._publish_block(sequence, index, digest)
        if self.states is not None:
            self._publish_states(sequence, self.states.kept)
        if self.windows is not None:
            self.windows.slide(sequence, (self._prompt_end(sequence), sequence.state.branch))

    def _publish_block(self, sequence: EngineSequence, index: int, digest: bytes) -> None:
        block, windows = int(sequence.blocks[index]), self.windows
        if windows is not None and windows.pool.find(digest) is None:
            self.pool.withdraw(digest)  # nobody could start after a block that windowed layers have lost
        self.pool.publish(block, digest)
        if windows is not None and self.pool.find(digest) == block:
            windows.publish(sequence, index, digest)

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
        left from which the sequence could continue, or a window before it, all of its cache is dropped.
        """
        sequence.forget_pending()
        del sequence.hashes[length // self.block_size :]
        sequence.cached = min(sequence.cached, length)
        if sequence.cached < len(sequence.digests) * self.block_size:
            self._drop_blocks(sequence, sequence.cached // self.block_size)
        if self.states is not None:
            self.states.forget_after(sequence.state, sequence.cached)
            self._check_state(sequence)
        if self.windows is not None and not self.windows.reaches(sequence):
            self._drop_blocks(sequence, 0)

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
        windowed = NO_WINDOWED_CHANGES if self.windows is None else self.windows.take_changes()
        return Changes(moves, np.concatenate([NO_SLOTS, *cleared]), *of_states, windowed)

    def make(self, changes: Changes) -> None:
        """Applies the changes. Any number of moves takes few kernel launches."""
        if self.states is not None:
            self.states.make(changes)
        _change(self._stored, changes.moves, changes.cleared)
        if self.windows is not None:
            self.windows.make(changes.windowed.blocks)
            _change(self._windowed, changes.windowed.moves, changes.windowed.cleared)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies slots in one operation: int64 [num_slots] on the device, with distinct targets."""
        _move(self._stored, source, target)
        if self.windows is not None:
            _move(self._windowed, self.windows.slots_of(source), self.windows.slots_of(target))

    def _move(self, sequence: EngineSequence, nodes: tuple[int, ...]) -> None:
        """Moves the kept pending nodes to the slots after the committed tokens."""
        if nodes and nodes[-1] != len(nodes) - 1:  # nodes ascend, so these have a gap
            start = sequence.cached
            source, target = start + np.asarray(nodes), start + np.arange(len(nodes))
            self._moves.append(Move(self._slots(sequence, source), self._slots(sequence, target)))
            if self.windows is not None:
                self.windows.move(sequence, source, target)
            if self.states is not None:
                self.states.move(sequence.state, source, target)

    def _evicted(self, digest: bytes) -> None:
        """Evicts with a block what is useless without it, later blocks first."""
        if self.states is not None:
            self.states.kept.drop(digest)
        if self.windows is not None:
            self.windows.pool.withdraw(digest)

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
        if self.windows is not None:
            self.windows.drop(sequence, keep)
        # Reversed, so that later blocks of a prefix are evicted before earlier blocks.
        for block in reversed(sequence.blocks.drop(keep)):
            self.pool.release(block)
        del sequence.digests[keep:]
        sequence.cached = min(sequence.cached, keep * self.block_size)
        sequence.forget_pending()
        if self.states is not None and not keep:
            self.states.release(sequence.state)


def _move(parts: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
    for stored in parts:
        stored[:, target] = stored[:, source]


def _change(parts: Sequence[torch.Tensor], moves: list[Move], cleared: Numbers) -> None:
    """Moves and clears slots of a pool, whose parts are [layers, slots, kv_heads, dim]."""
    if not parts or (not moves and not len(cleared)):
        return
    move = composed(moves)
    slots = np.concatenate([move.source, move.target, cleared])
    sizes = [len(move.source), len(move.target), len(cleared)]
    moved = to_device(torch.from_numpy(slots), parts[0].device)
    source, target, emptied = moved.split_with_sizes(sizes)
    if len(target):
        _move(parts, source, target)
    for stored in parts if len(emptied) else ():
        codes_of(stored).index_fill_(1, emptied, 0)


def composed(moves: list[Move]) -> Move:
    """Composes moves into a single move, which reads everything before it writes."""
    origins: dict[int, int] = {}  # key: slot; value: slot whose content it gets
    for move in moves:
        read = [origins.get(slot, slot) for slot in move.source.tolist()]
        origins.update(zip(move.target.tolist(), read, strict=True))
    return Move(np.array([*origins.values()], np.int64), np.array([*origins], np.int64))
