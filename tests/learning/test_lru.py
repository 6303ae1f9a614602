"""Store that forgets the least recently used entry."""

import pytest

from outrider.learning.lru import Lru


def test_lru_get_makes_a_missing_value_once() -> None:
    store: Lru[str, list[int]] = Lru(2)
    first = store.get("a", list)
    first.append(1)
    assert store.get("a", list) is first


def test_lru_get_over_the_bound_forgets_the_least_recently_used() -> None:
    store: Lru[str, int] = Lru(2)
    store.get("a", lambda: 1)
    store.get("b", lambda: 2)
    store.get("a", lambda: 9)
    store.get("c", lambda: 3)
    assert "b" not in store
    assert [*store.items()] == [("a", 1), ("c", 3)]


def test_lru_peek_is_no_use() -> None:
    store: Lru[str, int] = Lru(2)
    store.put("a", 1)
    store.put("b", 2)
    assert store.peek("a") == 1
    store.put("c", 3)
    assert store.peek("a") is None
    assert len(store) == 2


def test_lru_put_replaces_and_is_a_use() -> None:
    store: Lru[str, int] = Lru(2)
    store.put("a", 1)
    store.put("b", 2)
    store.put("a", 3)
    assert store.evict() == ("b", 2)
    assert store.peek("a") == 3


def test_lru_drop_twice_is_as_good_as_once() -> None:
    store: Lru[str, int] = Lru(1)
    store.put("a", 1)
    store.drop("a")
    store.drop("a")
    assert len(store) == 0


def test_lru_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_entries=0 must be at least 1"):
        Lru(0)
