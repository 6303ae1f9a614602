"""Store of bounded size that forgets the least recently used entry."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Lru(Generic[KeyT, ValueT]):
    """Values by key. ``get`` and ``put`` are uses of an entry; ``peek`` and ``in`` are not."""

    def __init__(self, max_entries: int) -> None:
        """Raises ValueError if ``max_entries`` is less than 1."""
        if max_entries < 1:
            raise ValueError(f"max_entries={max_entries} must be at least 1")
        self._max_entries = max_entries
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()  # least recently used first

    def get(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """Returns the value of the key; makes it if it is missing."""
        if key not in self._entries:
            self._entries[key] = make()
        value = self._entries[key]
        self._used(key)
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        """Sets the value of the key."""
        self._entries[key] = value
        self._used(key)

    def put_oldest(self, key: KeyT, value: ValueT) -> None:
        """Sets the value of the key, which becomes the least recently used."""
        self.put(key, value)
        self._entries.move_to_end(key, last=False)

    def peek(self, key: KeyT) -> ValueT | None:
        """Returns the value of the key, None if it is missing."""
        return self._entries.get(key)

    def drop(self, key: KeyT) -> None:
        """Removes the entry. Idempotent."""
        self._entries.pop(key, None)

    def evict(self) -> tuple[KeyT, ValueT]:
        """Removes the least recently used entry and returns it. Raises KeyError if the store is empty."""
        return self._entries.popitem(last=False)

    def items(self) -> Iterator[tuple[KeyT, ValueT]]:
        """Yields the entries, the least recently used first."""
        return iter(self._entries.items())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _used(self, key: KeyT) -> None:
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self.evict()
