"""A context has few parts, and enough of them for the processors of a GPU."""

import pytest

from outrider.engine.inputs.context_parts import parts_of, third_length


@pytest.mark.parametrize(
    ("slots", "parts"),
    [(1, 1), (128, 1), (129, 2), (4096, 32), (4097, 33), (20_480, 64), (20_481, 65), (131_072, 118)],
)
def test_parts_of_begins_parts_at_fixed_places(slots: int, parts: int) -> None:
    assert parts_of(slots, third_length(131_072)) == parts


@pytest.mark.parametrize("length", [1, 8192, 131_072, 131_073, 10**6, 10**7])
def test_third_length_any_context_has_at_most_four_times_the_parts_of_a_length(length: int) -> None:
    assert parts_of(length, third_length(length)) <= 4 * 32
