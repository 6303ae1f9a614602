"""Kernel that writes newly allocated blocks into the block tables on the device."""

import triton
import triton.language as tl

from outrider.engine.inputs import paged_input

NEW_BLOCKS_AT_ONCE = 1024  # blocks; enough for all sequences of a usual step
_NEW_BLOCKS = tl.constexpr(paged_input.WORK.index("new_blocks"))


@triton.jit
def take_in_blocks(
    block_tables,  # int32 [sequences, blocks]
    new_blocks,  # int32 [num_new, 2] places in the flattened tables, and the blocks there
    work,  # int64 [5] numbers of paged_input.WORK
    AT_ONCE: tl.constexpr,
):
    """Writes new blocks into the tables. The grid is a single program."""
    num_new = tl.load(work + _NEW_BLOCKS).to(tl.int32)
    for start in range(0, num_new, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        is_new = number < num_new
        place = tl.load(new_blocks + 2 * number, mask=is_new, other=0)
        block = tl.load(new_blocks + 2 * number + 1, mask=is_new, other=0)
        tl.store(block_tables + place, block, mask=is_new)
