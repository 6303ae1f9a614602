"""What stands of Drafts by the coupled rule, found where their tokens were chosen: one launch for all.

The rule is ``verify_coupled`` in outrider/decoding/verify.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from outrider.decoding.draft import Draft

ROWS = 128  # of a program
_NO_ROW = -(2**40)  # far below every row


@dataclass(frozen=True)
class DraftRows:
    """Which rows of a step's logits belong to nodes of Drafts."""

    numbers: NDArray[np.int64]  # [2, num_rows] the row whose token each is drafted after, below 0: none; it
    depth: int  # nodes of the longest path

    @classmethod
    def of(cls, drafts: Sequence[Draft], counts: Sequence[int]) -> "DraftRows | None":
        """None where nothing was drafted.

        counts: rows of each piece of work: where it has a Draft, the root's and the nodes' in their order.
        """
        if not any(drafts):
            return None
        pairs = [*zip(drafts, counts, strict=True)]
        parents = ((_NO_ROW, *draft.parents) if draft else (_NO_ROW,) * count for draft, count in pairs)
        tokens = ((0, *draft.tokens) if draft else (0,) * count for draft, count in pairs)
        numbers = np.empty((2, sum(counts)), np.int64)
        roots = np.cumsum(counts) - counts
        numbers[0] = np.fromiter(chain.from_iterable(parents), np.int64) + np.repeat(roots + 1, counts)
        numbers[1] = np.fromiter(chain.from_iterable(tokens), np.int64)
        return cls(numbers, max(1 + max(draft.depths) for draft in drafts if draft))


@triton.jit(do_not_specialize=["ranks", "num_rows", "depth"])
def find_path(ranked, ranks, drafts, num_rows, depth, stands, BLOCK: tl.constexpr):
    """Whether each row stands: at every node from the root to it the token was chosen that was drafted.

    drafts: DraftRows.numbers.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    node, holds = rows.to(tl.int64), inside
    for _ in range(depth):
        parent = tl.load(drafts + node, mask=inside, other=-1)
        is_node = inside & (parent >= 0)
        token = tl.load(drafts + num_rows + node, mask=is_node, other=0)
        chosen = tl.load(ranked + parent * ranks, mask=is_node, other=0)
        holds = holds & ((token == chosen) | (parent < 0))
        node = tl.where(is_node, parent, node)
    tl.store(stands + rows, holds, mask=inside)
