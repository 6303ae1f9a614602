"""Low-rank changes of adapters on a GPU: a row's products with both weights of its adapter, as two kernels.

A program computes a tile of rows that have one adapter. It finds the adapter's weights by their addresses in
a table on the device. So a CUDA graph computes the adapters that the table holds when the graph is replayed.

Inputs are divided into parts of a fixed length, whose sums are added in order. All instructions have shapes
that depend neither on the number of rows nor on other adapters. So a row has the same bits in any company.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.inputs import paged_input

TILE_FIELDS = tl.constexpr(paged_input.ADAPTER_FIELDS)
TABLE_FIELDS = tl.constexpr(3)  # addresses of both weights of an adapter, and its rank
ALIGNMENT = tl.constexpr(16)  # bytes of which an address is a multiple: torch's allocator takes more
PART = 1024  # inputs that a program of ``shrink_rows`` reads; more would leave multiprocessors idle
SPAN = 64  # inputs that it reads at a time
RANKS_AT_ONCE = 16  # ranks that a program of ``expand_rows`` reads at a time: the fewest for tensor cores
TILE = 64  # ranks or outputs of a program: the fewest for which an H100 has a single kind of instruction
WARPS, STAGES = 4, 3  # groups of 32 threads; loads in flight


@triton.jit
def shrink_rows(
    rows,  # [num_rows, INPUTS]
    table,  # int64 [1 + adapters, TABLE_FIELDS]
    adapter_rows,  # int64 [num_rows]
    adapter_tiles,  # int64 [tiles, TILE_FIELDS]
    parts,  # float32 [num_rows, PARTS, RANKS] sums of the parts, in the order of adapter_rows
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,  # highest rank of an adapter
    PART: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = adapter_tiles + tl.program_id(0) * TILE_FIELDS
    adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    own = table + adapter * TABLE_FIELDS
    rank, start = tl.load(own + 2), tl.program_id(2) * TILE
    if (count == 0) | (start >= rank):
        return
    weight = tl.multiple_of(tl.load(own).to(tl.pointer_type(rows.dtype.element_ty)), [ALIGNMENT])
    at, line, of = start + tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, SPAN)
    is_rank, is_row = at < rank, line < count
    row = tl.load(adapter_rows + first + line, mask=is_row, other=0)
    total = tl.zeros([TILE, ROWS], tl.float32)
    for begin in range(0, PART, SPAN):
        place = tl.program_id(1) * PART + begin + of
        is_input = place < INPUTS
        own_weight = weight + at[:, None] * INPUTS + place[None, :]
        number = tl.load(own_weight, mask=is_rank[:, None] & is_input[None, :], other=0.0)
        own_rows = rows + row[None, :] * INPUTS + place[:, None]
        given = tl.load(own_rows, mask=is_input[:, None] & is_row[None, :], other=0.0)
        total = tl.dot(number, given, total, input_precision="ieee")
    of_part = ((first + line)[None, :] * PARTS + tl.program_id(1)) * RANKS + at[:, None]
    tl.store(parts + of_part, total, mask=is_rank[:, None] & is_row[None, :])


@triton.jit
def expand_rows(
    parts,  # output of shrink_rows
    table,
    adapter_rows,
    adapter_tiles,
    output,  # [num_rows, OUTPUTS], to which the changes are added
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = adapter_tiles + tl.program_id(0) * TILE_FIELDS
    adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    own = table + adapter * TABLE_FIELDS
    rank = tl.load(own + 2)
    if (count == 0) | (rank == 0):
        return
    weight = tl.multiple_of(tl.load(own + 1).to(tl.pointer_type(output.dtype.element_ty)), [ALIGNMENT])
    at, line = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, ROWS)
    is_output, is_row = at < OUTPUTS, line < count
    total = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(0, rank, SPAN):
        of = start + tl.arange(0, SPAN)
        is_rank = of < rank
        own_parts = parts + (first + line)[None, :] * (PARTS * RANKS) + of[:, None]
        shrunk = tl.zeros([SPAN, ROWS], tl.float32)
        for part in tl.static_range(PARTS):
            inside = is_rank[:, None] & is_row[None, :]
            shrunk += tl.load(own_parts + part * RANKS, mask=inside, other=0.0)
        own_weight = weight + of[None, :] * OUTPUTS + at[:, None]
        number = tl.load(own_weight, mask=is_output[:, None] & is_rank[None, :], other=0.0)
        total = tl.dot(number, shrunk.to(number.dtype), total, input_precision="ieee")
    row = tl.load(adapter_rows + first + line, mask=is_row, other=0)
    own_output = output + row[None, :] * OUTPUTS + at[:, None]
    inside = is_output[:, None] & is_row[None, :]
    total += tl.load(own_output, mask=inside, other=0.0).to(tl.float32)
    tl.store(own_output, total.to(output.dtype.element_ty), mask=inside)


def add_low_rank(
    rows: Tensor, table: Tensor, adapter_rows: Tensor, adapter_tiles: Tensor, most_ranks: int, output: Tensor
) -> None:
    """Adds to each row's output the product with the weights of its adapter, in place.

    Args:
        rows: [num_rows, inputs].
        table: int64 [1 + adapters, 3] by number of the adapter: addresses of its weights [rank, inputs] and
            [rank, outputs], contiguous and of the rows' type, and its rank; rank 0: no change.
        adapter_rows, adapter_tiles: fields of PagedInput.
        most_ranks: highest rank of an adapter.
        output: [num_rows, outputs], contiguous.
    """
    (num_rows, inputs), outputs, tiles = rows.shape, output.shape[1], len(adapter_tiles)
    part = min(PART, SPAN * triton.cdiv(inputs, SPAN))
    num_parts = triton.cdiv(inputs, part)
    parts = rows.new_empty(num_rows, num_parts, most_ranks, dtype=torch.float32)
    sizes = {"PARTS": num_parts, "RANKS": most_ranks, "TILE": TILE, "ROWS": paged_input.ADAPTER_TILE}
    options = {"num_warps": WARPS, "num_stages": STAGES}
    shrink_rows[(tiles, num_parts, triton.cdiv(most_ranks, TILE))](
        rows.contiguous(),
        table,
        adapter_rows,
        adapter_tiles,
        parts,
        INPUTS=inputs,
        PART=part,
        SPAN=SPAN,
        **sizes,
        **options,
    )
    expand_rows[(tiles, triton.cdiv(outputs, TILE))](
        parts,
        table,
        adapter_rows,
        adapter_tiles,
        output,
        OUTPUTS=outputs,
        SPAN=RANKS_AT_ONCE,
        **sizes,
        **options,
    )
