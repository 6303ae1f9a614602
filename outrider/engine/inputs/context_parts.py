"""Division of a context into parts, which several programs of a GPU can read in parallel.

The boundaries depend only on the position. A context has PARTS parts of SHORTEST slots, then PARTS parts of
SECOND slots. Parts of a third length follow up to the end of the context.
"""

PARTS = 32  # parts of each of the first two lengths; a context has at most 4 * PARTS parts of all lengths
SHORTEST = 128  # slots; reading fewer slots takes a program less time than starting
SECOND = 4 * SHORTEST  # slots
LEAST_THIRD = 4 * SECOND  # slots


def third_length(context_length: int) -> int:
    """Returns the slots of a part of the third length: a power of two.

    context_length: tokens of the longest sequence.
    """
    return max(LEAST_THIRD, 1 << (-(-context_length // (2 * PARTS)) - 1).bit_length())


def parts_of(slots: int, third: int) -> int:
    """Returns the number of parts of a context of ``slots`` slots. third: result of third_length."""
    first, second = min(slots, PARTS * SHORTEST), min(slots - PARTS * SHORTEST, PARTS * SECOND)
    rest = slots - PARTS * (SHORTEST + SECOND)
    return -(-first // SHORTEST) + -(-max(second, 0) // SECOND) + -(-max(rest, 0) // third)
