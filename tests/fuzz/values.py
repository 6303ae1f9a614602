"""Values of a field at three levels: ordinary, extreme but accepted, and malformed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

VOCAB_SIZE = 2048  # tokens of the demo pair
WHOLE = sorted(
    number
    for bits in (0, 1, 8, 11, 16, 31, 32, 53, 63, 64)
    for number in (2**bits - 1, 2**bits, 2**bits + 1, -(2**bits))
)
REAL = sorted(
    sign * size
    for sign in (1.0, -1.0)
    for size in (0.0, 5e-324, 1e-300, 1e-45, 1e-40, 6e-38, 1e-7, 0.1, 1.0, 80.0, 1e4, 3e38, 1e39, 1.7e308)
)
TEXTS = ["", " ", "\0", "\n" * 40, "e\u0301", "🏇🏽", "\ufffd", "<|end|>", "{{ x }}", "\\", '"', "ab " * 700]


@dataclass(frozen=True)
class Levels:
    """Strategies of one field, by level; no strategy is empty."""

    ordinary: SearchStrategy[Any]  # values that clients send
    extreme: SearchStrategy[Any]  # the limits of what a schema accepts
    malformed: SearchStrategy[Any]  # anything else that the format can carry

    def of(self, level: str) -> SearchStrategy[Any]:
        strategy: SearchStrategy[Any] = getattr(self, level)
        return strategy


def whole(low: float, high: float, malformed: SearchStrategy[Any]) -> Levels:
    """Integers from ``low`` to ``high``, both included; ordinary integers of an open range are small."""
    least = max(low, 0 if high >= 0 else -math.inf)
    ordinary = st.integers(int(least), int(least) + 3 if high == math.inf else int(high))
    return Levels(ordinary, _within(WHOLE, low, high, ordinary), malformed)


def real(low: float, high: float, malformed: SearchStrategy[Any]) -> Levels:
    """Finite numbers from ``low`` to ``high``, both included."""
    ordinary = st.floats(max(low, -4.0), min(high, 4.0))
    edges = [*REAL, *(limit for limit in (low, high) if math.isfinite(limit))]
    return Levels(ordinary, _within(edges, low, high, ordinary), malformed)


def text(shortest: int, longest: float, malformed: SearchStrategy[Any]) -> Levels:
    ordinary = st.text(min_size=shortest, max_size=max(shortest, 4))
    edges = [value for value in TEXTS if shortest <= len(value) <= longest]
    return Levels(ordinary, st.sampled_from(edges or ["x" * shortest]), malformed)


def one_of(values: Collection[Any], malformed: SearchStrategy[Any]) -> Levels:
    known = st.sampled_from(list(values))
    return Levels(known, known, malformed)


def several(item: Levels, fewest: int, most: float, malformed: SearchStrategy[Any]) -> Levels:
    """Lists of items."""

    def lists(items: SearchStrategy[Any], smallest: int, largest: float) -> SearchStrategy[Any]:
        return st.lists(items, min_size=max(fewest, smallest), max_size=int(min(most, largest)))

    if most == 0:
        return Levels(st.just([]), st.just([]), malformed)
    alike = st.builds(lambda value, count: [value] * int(min(max(count, fewest), most)), item.extreme, LONG)
    extreme = lists(item.extreme, 1, 2) | alike | lists(item.ordinary, fewest, fewest)
    return Levels(lists(item.ordinary, 1, 3), extreme, malformed | lists(item.malformed, 1, 2))


LONG = st.sampled_from([16, 17, 300, 3000])


def fields(levels: Mapping[str, Levels], required: Collection[str], malformed: SearchStrategy[Any]) -> Levels:
    """Objects with some of the fields.

    An extreme object has up to four extreme fields among ordinary fields. A malformed object has a malformed
    field, or lacks a required field.
    """

    def some(level: str, most: int) -> SearchStrategy[dict[str, Any]]:
        if not levels:
            return st.just({})
        odd = st.lists(st.sampled_from(sorted(levels)), min_size=1, max_size=most, unique=True)
        return odd.flatmap(
            lambda names: st.tuples(
                _some_of(levels, required),
                st.fixed_dictionaries({name: levels[name].of(level) for name in names}),
            ).map(lambda parts: parts[0] | parts[1])
        )

    lacking = st.builds(
        lambda whole, name: {key: value for key, value in whole.items() if key != name},
        _some_of(levels, required),
        st.sampled_from(sorted(required) or [""]),
    )
    wrong = some("malformed", 1) | some("malformed", 1) | (lacking | malformed)
    return Levels(_some_of(levels, required), some("extreme", 4), wrong)


LIKELY = {"speculation", "verification", "sampling"}  # these fields matter to all further fields


def _some_of(levels: Mapping[str, Levels], required: Collection[str]) -> SearchStrategy[dict[str, Any]]:
    """Ordinary values of the required fields and a few further fields."""
    optional = sorted(levels.keys() - set(required))
    chosen = st.sets(st.sampled_from(optional), max_size=6) if optional else st.just(set[str]())
    likely = st.sampled_from([set[str](), levels.keys() & LIKELY])
    return st.builds(set.union, chosen, likely).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: levels[name].ordinary for name in sorted(names.union(required))}
        )
    )


def graded(levels: Levels, *, ordinary: int = 9, extreme: int = 9, malformed: int = 2) -> SearchStrategy[Any]:
    """Values of all levels, in the given proportions."""
    names = ["ordinary"] * ordinary + ["extreme"] * extreme + ["malformed"] * malformed
    return st.sampled_from(names).flatmap(levels.of)


def _within(
    edges: Collection[Any], low: float, high: float, otherwise: SearchStrategy[Any]
) -> SearchStrategy[Any]:
    inside = [edge for edge in edges if low <= edge <= high]
    return st.sampled_from(inside) if inside else otherwise
