"""Parts of a context, which several programs of a GPU may read at once.

They begin at places that depend on nothing but the position. A context has PARTS parts of SHORTEST slots,
then as many that are four times as long. Parts of a third length follow up to its end.
"""

PARTS = 32  # parts of each of the first two lengths: three lengths give a context at most four times as many
SHORTEST = 128  # slots: reading fewer takes a program less time than starting
SECOND = 4 * SHORTEST  # slots
LEAST_THIRD = 4 * SECOND  # slots


def third_length(context_length: int) -> int:
    """Returns the slots of a part far into a context: a power of two.

    context_length: tokens of the longest sequence.
    """
    return max(LEAST_THIRD, 1 << (-(-context_length // (2 * PARTS)) - 1).bit_length())


def parts_of(slots: int, third: int) -> int:
    """Returns the number of parts of a context of ``slots`` slots. third: what third_length returned."""
    first, second = min(slots, PARTS * SHORTEST), min(slots - PARTS * SHORTEST, PARTS * SECOND)
    rest = slots - PARTS * (SHORTEST + SECOND)
    return -(-first // SHORTEST) + -(-max(second, 0) // SECOND) + -(-max(rest, 0) // third)
