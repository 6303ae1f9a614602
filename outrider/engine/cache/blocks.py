"""Pool of cache blocks: reference counts, sharing by content, eviction of the least recently used."""

from collections.abc import Callable

from outrider.learning.lru import Lru


class BlockPool:
    """Blocks of a cache: how many users each has, and under which digest it is published.

    A block is free, used, or kept. A kept block is unused but published: it can be found until it is evicted.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[bytes], None] | None = None) -> None:
        """evicted: callback for the digest of each evicted block."""
        self._evicted = evicted
        self.num_blocks = num_blocks
        # Blocks are taken from the end: released blocks are used first, so that unused memory stays unmapped.
        self._free: dict[int, None] = dict.fromkeys(reversed(range(num_blocks)))
        self._users = [0] * num_blocks
        self._kept = Lru[int, bytes](num_blocks)  # digests of unused blocks
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Returns the number of blocks that can be allocated now, kept blocks included."""
        return len(self._free) + len(self._kept)

    @property
    def share_available(self) -> float:
        """Returns the share of the blocks that can be allocated now."""
        return self.available / self.num_blocks

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes ``count`` blocks, if possible after block ``after``: adjacent blocks are read without a copy.

        Raises:
            ValueError: fewer than ``count`` are available.
        """
        if count > self.available:
            raise ValueError(f"count={count} exceeds the {self.available} blocks available")
        blocks = []
        for _ in range(count):
            after = self._take(None if after is None else after + 1)
            blocks.append(after)
        return blocks

    def _take(self, wanted: int | None) -> int:
        if wanted in self._free:
            del self._free[wanted]
            block = wanted
        elif self._free:
            block, _ = self._free.popitem()
        else:
            block, digest = self._kept.evict()
            del self._block_of[digest], self._digest_of[block]
            if self._evicted is not None:
                self._evicted(digest)
        self._users[block] = 1
        return block

    def find(self, digest: bytes) -> int | None:
        """Returns the block that is published under ``digest``; None: there is none, or it was evicted."""
        return self._block_of.get(digest)

    def share(self, block: int) -> None:
        """Adds a user to a published block."""
        self._kept.drop(block)
        self._users[block] += 1

    def release(self, block: int, *, is_wanted: bool = True) -> None:
        """Removes a user. The last user frees the block, or leaves it in the pool if it is published.

        is_wanted: whether the block is evicted in its turn; False: it is evicted first.
        """
        self._users[block] -= 1
        if self._users[block]:
            return
        if (digest := self._digest_of.get(block)) is not None:
            put = self._kept.put if is_wanted else self._kept.put_oldest
            put(block, digest)
        else:
            self._free[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Publishes the block for other sequences. Of equal blocks only the first is published."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def withdraw(self, digest: bytes) -> None:
        """Makes the block that is published under ``digest``, if any, impossible to find."""
        block = self._block_of.pop(digest, None)
        if block is None:
            return
        del self._digest_of[block]
        if block in self._kept:
            self._kept.drop(block)
            self._free[block] = None
