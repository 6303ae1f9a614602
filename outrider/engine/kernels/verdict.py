"""Accepted nodes of Drafts by the coupled rule, found on the device by one launch for all Drafts.

The rule is ``verify_coupled`` in outrider/decoding/verify.py.
"""

import triton
import triton.language as tl

PROGRAM_ROWS = 128  # rows that a program follows


@triton.jit(do_not_specialize=["ranks", "num_rows", "depth"])
def find_path(top_tokens, ranks, drafts, num_rows, depth, are_accepted, BLOCK: tl.constexpr):
    """Finds accepted rows: at every node from the root to the row, the drafted token was chosen.

    drafts: DraftRows.numbers, see outrider/engine/inputs/choice_input.py.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    node, holds = rows.to(tl.int64), inside
    for _ in range(depth):
        parent = tl.load(drafts + node, mask=inside, other=-1)
        is_node = inside & (parent >= 0)
        token = tl.load(drafts + num_rows + node, mask=is_node, other=0)
        chosen = tl.load(top_tokens + parent * ranks, mask=is_node, other=0)
        holds = holds & ((token == chosen) | (parent < 0))
        node = tl.where(is_node, parent, node)
    tl.store(are_accepted + rows, holds, mask=inside)
