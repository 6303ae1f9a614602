"""Memory of a simulated device: allocated by a process, and reserved by torch's allocator."""

import weakref
from collections import Counter

import torch


class Memory:
    """Memory of one device from the view of one process.

    Each storage has its own block of memory. A freed block stays reserved, and is reused only for an equal
    size. So unused blocks of other sizes accumulate, as fragmentation in torch.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held_by_others = 0  # bytes that other processes hold; set by tests
        self.fraction = 1.0  # share of the device that the allocator may use
        self.allocated = self.reserved = 0  # bytes
        self._tensors: dict[int, tuple[int, int]] = {}  # key: address; tensors on the block, its bytes
        self._unused: Counter[int] = Counter()  # number of free blocks by size in bytes
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def free(self) -> int:
        """Bytes that no process has reserved."""
        return self.total - self.held_by_others - self.reserved

    def hold(self, tensor: torch.Tensor, numbers: torch.Tensor) -> None:
        """Counts a tensor's memory until its last tensor is deleted. Raises OutOfMemoryError."""
        storage = numbers.untyped_storage()
        size, piece = storage.nbytes(), storage.data_ptr()
        if not size:
            return
        if piece not in self._tensors:
            self._take(size)
        count, size = self._tensors.get(piece, (0, size))
        self._tensors[piece] = count + 1, size
        name = id(tensor)

        def forget(_: object) -> None:
            self._watched.pop(name, None)
            self._release(piece)

        self._watched[name] = weakref.ref(tensor, forget)

    def empty_cache(self) -> None:
        """Returns free blocks to the device."""
        self.reserved = self.allocated
        self._unused.clear()

    def _take(self, size: int) -> None:
        if self._unused[size]:
            self._unused[size] -= 1
        else:
            if not self._has_room(size):
                self.empty_cache()
            if not self._has_room(size):
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes: {self.fraction * self.total:.0f} "
                    f"bytes are allowed, {self.reserved} reserved, {self.free} free on the device"
                )
            self.reserved += size
        self.allocated += size

    def _has_room(self, size: int) -> bool:
        return size <= self.free and self.reserved + size <= self.fraction * self.total

    def _release(self, piece: int) -> None:
        count, size = self._tensors.pop(piece)
        if count > 1:
            self._tensors[piece] = count - 1, size
            return
        self.allocated -= size
        self._unused[size] += 1
