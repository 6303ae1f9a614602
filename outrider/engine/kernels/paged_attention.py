"""Attention over the paged cache as Triton kernels: decoding, verifying chains and trees, and prompts.

The queries of one sequence that follow one another in the batch form a tile; its query heads that share a
key/value head are computed together, so that the cache is read once for all of them. Few queries over a long
context would leave most of a GPU idle: their context is split, and the parts are joined by their weights
(Dao et al., "Flash-Decoding for long-context inference", 2023). A context is always split at the same places,
and masked slots change no bit of a result: a row's output does not depend on its tile or its batch. If
drafted ancestors are read in the order of a chain, their places among other nodes do not matter either.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.engine.inputs.paged_input import FEW_TILE, MANY_TILE, TILE_FIELDS, PagedInput

LEAST_LINES = 16  # lines of a matrix product, at least: what tl.dot takes


@dataclass(frozen=True)
class Tiling:
    """Size of a program's work on a tile."""

    rows: int  # rows of a tile
    lines: int  # rows times query heads that are computed together, at most
    warps: int


FEW = Tiling(FEW_TILE, 64, warps=4)
MANY = Tiling(MANY_TILE, 128, warps=8)
STAGES = 2  # stages of reading ahead
MOST_SLOTS = 128  # slots that are read at a time
SHARE = 0.6  # share of a multiprocessor's memory for the keys and values that are read ahead
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_stride", "words", "path_length", "splits"])
def _attend_tile(
    query,  # [heads, rows, key_dim], by strides
    keys,  # [slots, kv_heads, key_dim]
    values,  # [slots, kv_heads, value_dim]
    block_table,  # int64 [lanes, table_stride]
    tiles,  # int64 [num_tiles, TILE_FIELDS]
    work,  # int64 [2] tiles that there are, and slots of the longest of their contexts
    seen,  # int64 [rows] slots before that are all visible
    ancestors,  # int64 [rows, words] bits of the nodes from the root on that are visible besides
    paths,  # int64 [rows, path_length] nodes up to the row's own, with CHAINS, of a tile that has a root
    positions,  # int64 [rows]
    sinks,  # [heads]
    output,  # [rows, heads, value_dim]
    parts,  # float32 [rows, heads, splits, value_dim]
    weights,  # float32 [rows, heads, splits] logarithms, base 2, of each part's sum
    query_head_stride,
    query_row_stride,
    table_stride,
    words,
    path_length,
    splits,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,  # query heads of a kv head
    GROUP: tl.constexpr,  # heads that are computed together
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,  # a power of two
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # slots of a cache block
    FIELDS: tl.constexpr,
    M: tl.constexpr,  # rows of a tile times query heads of a group, at most; a power of two
    N: tl.constexpr,  # slots at a time
    SPLIT: tl.constexpr,  # slots of a part; 0: the context is not split
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINS: tl.constexpr,  # whether a row is computed as if what is drafted before it were a chain
    PRECISION: tl.constexpr,
):
    # A captured grid has to fit every batch. Starting programs without work would take longer than the work
    # itself, so few programs share it.
    num_tiles, num_parts = tl.load(work).to(tl.int32), 1
    if SPLIT > 0:
        num_parts = tl.cdiv(tl.load(work + 1).to(tl.int32), SPLIT)
    head = tl.program_id(1) * GROUP // REPEATS
    lines = tl.arange(0, M)
    for piece in range(tl.program_id(0), num_tiles * num_parts, tl.num_programs(0)):
        split = piece % num_parts
        tile = tiles + piece // num_parts * FIELDS
        lane, first = tl.load(tile), tl.load(tile + 1)
        count, end, root = (
            tl.load(tile + 2).to(tl.int32),
            tl.load(tile + 3).to(tl.int32),
            tl.load(tile + 4).to(tl.int32),
        )
        begin = split * SPLIT
        if begin < end:
            if SPLIT > 0:
                end = tl.minimum(end, begin + SPLIT)
            row = first + lines // GROUP
            query_head = tl.program_id(1) * GROUP + lines % GROUP
            real = lines // GROUP < count
            of_key, of_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
            has_key, has_value = of_key < KEY_DIM, of_value < VALUE_DIM
            at = query + query_head[:, None] * query_head_stride + row[:, None] * query_row_stride
            q = tl.load(at + of_key[None, :], mask=real[:, None] & has_key[None, :], other=0.0)
            sees = tl.load(seen + row, mask=real, other=0).to(tl.int32)
            position = tl.load(positions + row, mask=real, other=0).to(tl.int32)
            least = tl.min(tl.where(real, sees, 1 << 30), 0)  # slots that every row sees
            if WINDOW:
                oldest = tl.min(tl.where(real, position, 1 << 30), 0) - window + 1
                begin = tl.maximum(begin, tl.maximum(oldest, 0) // N * N)
                least = begin  # every block is looked at slot by slot
            if CHAINS:
                least = tl.minimum(least, root)  # from there on slots are looked up
            plain_end = tl.maximum(begin, tl.minimum(least, end) // N * N)
            largest = tl.full((M,), float("-inf"), tl.float32)
            total = tl.zeros((M,), tl.float32)
            summed = tl.zeros((M, VALUE_WIDTH), tl.float32)
            unit = LOG2_E if SOFTCAP else scale * LOG2_E
            for place in range(begin, plain_end, N):
                slots = place + tl.arange(0, N)
                block = tl.load(block_table + lane * table_stride + slots // BLOCK)
                slot = (block * BLOCK + slots % BLOCK) * KV_HEADS + head
                k = tl.load(
                    keys + slot[None, :] * KEY_DIM + of_key[:, None], mask=has_key[:, None], other=0.0
                )
                scores = tl.dot(q, k, input_precision=PRECISION)
                if SOFTCAP:
                    scores = _capped(scores * scale, softcap)
                # The difference comes before the product: so no mask between makes it round otherwise.
                new = tl.maximum(largest, tl.max(scores, 1))
                fade = tl.exp2((largest - new) * unit)
                probs = tl.exp2((scores - new[:, None]) * unit)
                total = total * fade + tl.sum(probs, 1)
                v = tl.load(
                    values + slot[:, None] * VALUE_DIM + of_value[None, :], mask=has_value[None, :], other=0.0
                )
                summed = tl.dot(probs.to(v.dtype), v, summed * fade[:, None], input_precision=PRECISION)
                largest = new
            for place in range(plain_end, end, N):
                slots = place + tl.arange(0, N)
                inside = slots < end
                held = slots
                if CHAINS:
                    drafted = inside & (slots >= root)
                    path = paths + first * path_length + tl.where(drafted, slots - root, 0)
                    held = tl.where(drafted, root + tl.load(path, mask=drafted, other=0).to(tl.int32), slots)
                block = tl.load(block_table + lane * table_stride + held // BLOCK, mask=inside, other=0)
                slot = (block * BLOCK + held % BLOCK) * KV_HEADS + head
                k = tl.load(
                    keys + slot[None, :] * KEY_DIM + of_key[:, None],
                    mask=inside[None, :] & has_key[:, None],
                    other=0.0,
                )
                scores = tl.dot(q, k, input_precision=PRECISION)
                if SOFTCAP:
                    scores = _capped(scores * scale, softcap)
                visible = slots[None, :] < sees[:, None]
                if not CHAINS and place + N > root:
                    node = tl.maximum(slots - root, 0)
                    word = tl.load(
                        ancestors + row[:, None] * words + node[None, :] // 64,
                        mask=real[:, None] & (slots >= root)[None, :] & inside[None, :],
                        other=0,
                    )
                    visible = visible | (((word >> (node % 64)[None, :]) & 1) != 0)
                if WINDOW:
                    near = slots[None, :] > position[:, None] - window
                    visible = visible & (near if CHAINS else near | (slots >= root)[None, :])
                scores = tl.where(visible & inside[None, :] & real[:, None], scores, float("-inf"))
                new = tl.maximum(largest, tl.max(scores, 1))
                finite = tl.where(new == float("-inf"), 0.0, new)  # nothing is visible so far
                fade = tl.exp2((largest - finite) * unit)
                probs = tl.exp2((scores - finite[:, None]) * unit)
                total = total * fade + tl.sum(probs, 1)
                v = tl.load(
                    values + slot[:, None] * VALUE_DIM + of_value[None, :],
                    mask=inside[:, None] & has_value[None, :],
                    other=0.0,
                )
                summed = tl.dot(probs.to(v.dtype), v, summed * fade[:, None], input_precision=PRECISION)
                largest = new
            divisor = tl.where(total == 0.0, 1.0, total)
            weight = tl.where(total == 0.0, float("-inf"), largest * unit + tl.log2(divisor))
            summed = summed / divisor[:, None]
            to = row * KV_HEADS * REPEATS + query_head
            if SPLIT > 0:
                to = to * splits + split
                tl.store(
                    parts + to[:, None] * VALUE_DIM + of_value[None, :],
                    summed,
                    mask=real[:, None] & has_value[None, :],
                )
                tl.store(weights + to, weight, mask=real)
            else:
                if SINKS:
                    sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2_E
                    top = tl.maximum(weight, sink)
                    summed = (
                        summed
                        * (tl.exp2(weight - top) / (tl.exp2(weight - top) + tl.exp2(sink - top)))[:, None]
                    )
                tl.store(
                    output + to[:, None] * VALUE_DIM + of_value[None, :],
                    summed.to(output.dtype.element_ty),
                    mask=real[:, None] & has_value[None, :],
                )


@triton.jit
def _capped(scores, softcap):
    """Returns softcap * tanh(scores / softcap)."""
    faded = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
    tanh = (1.0 - faded) / (1.0 + faded)
    return softcap * tl.where(scores < 0, -tanh, tanh)


@triton.jit(do_not_specialize=["splits"])
def _join_parts(
    parts,  # float32 [rows, heads, splits, value_dim]
    weights,  # float32 [rows, heads, splits]
    ends,  # int64 [rows] slots up to the row's own; 0: padding, below 0: it was not split
    sinks,  # [heads]
    output,  # [rows, heads, value_dim]
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    to = row.to(tl.int64) * HEADS + head
    of_value = tl.arange(0, VALUE_WIDTH)
    has_value = of_value < VALUE_DIM
    largest = float("-inf")
    total = 0.0
    if SINKS:
        largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    summed = tl.zeros((VALUE_WIDTH,), tl.float32)
    end = tl.load(ends + row)
    if end < 0:
        return
    for split in range(0, tl.cdiv(end, SPLIT)):
        weight = tl.load(weights + to * splits + split)
        if weight != float("-inf"):
            part = tl.load(parts + (to * splits + split) * VALUE_DIM + of_value, mask=has_value, other=0.0)
            new = tl.maximum(largest, weight)
            fade, share = tl.exp2(largest - new), tl.exp2(weight - new)
            summed = summed * fade + part * share
            total = total * fade + share
            largest = new
    summed = summed / tl.where(total == 0.0, 1.0, total)
    tl.store(output + to * VALUE_DIM + of_value, summed.to(output.dtype.element_ty), mask=has_value)


@dataclass(frozen=True)
class PagedAttention:
    """Kernels of one engine. They implement outrider.engine.forward.kernel.Kernel."""

    block_size: int  # slots
    split: int  # slots of a part of the context, a multiple of MOST_SLOTS
    shared_memory: int  # bytes that a program may have on a multiprocessor
    programs: int  # programs that share the work of few queries
    is_asynchronous: bool = True

    def __call__(
        self,
        paged: PagedInput[torch.Tensor],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, rows, key_dim = query.shape
        kv_heads, value_dim = values.shape[1:]
        repeats = heads // kv_heads
        output = query.new_empty(rows, heads, value_dim)
        splits = -(-paged.block_table.shape[1] * self.block_size // self.split)
        held = rows if len(paged.few_tiles) else 0
        parts = query.new_empty(held, heads, splits, value_dim, dtype=torch.float32)
        weights = query.new_empty(held, heads, splits, dtype=torch.float32)
        widths = [max(LEAST_LINES, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim)]
        few, many = (paged.few_tiles, FEW, self.split), (paged.many_tiles, MANY, 0)
        for work, (tiles, tiling, split) in zip(paged.work, (few, many), strict=True):
            if not len(tiles):
                continue
            group = math.gcd(repeats, tiling.lines // tiling.rows)
            most = len(tiles) * splits if split else len(tiles)
            programs = min(most, -(-self.programs * group // heads)) if split else most
            _attend_tile[(programs, heads // group)](
                query,
                keys,
                values,
                paged.block_table,
                tiles,
                work,
                paged.seen,
                paged.ancestors,
                paged.paths,
                paged.position_ids,
                sinks,
                output,
                parts,
                weights,
                query.stride(0),
                query.stride(1),
                paged.block_table.shape[1],
                paged.ancestors.shape[1],
                paged.paths.shape[1],
                splits,
                key_dim**-0.5 if scaling is None else scaling,
                softcap,
                window,
                KV_HEADS=kv_heads,
                REPEATS=repeats,
                GROUP=group,
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                KEY_WIDTH=widths[0],
                VALUE_WIDTH=widths[1],
                BLOCK=self.block_size,
                FIELDS=TILE_FIELDS,
                M=max(LEAST_LINES, group * tiling.rows),
                N=self._slots(sum(widths) * query.element_size()),
                SPLIT=split,
                WINDOW=window is not None,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                CHAINS=paged.paths.shape[1] > 0,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
                num_warps=tiling.warps,
                num_stages=STAGES,
            )
        if len(paged.few_tiles):
            _join_parts[(rows, heads)](
                parts,
                weights,
                paged.ends,
                sinks,
                output,
                splits,
                HEADS=heads,
                VALUE_DIM=value_dim,
                VALUE_WIDTH=widths[1],
                SPLIT=self.split,
                SINKS=sinks is not None,
                num_warps=1,
            )
        return output

    def _slots(self, size: int) -> int:
        """Returns the number of slots of ``size`` bytes that are read at a time: a power of two."""
        most = int(SHARE * self.shared_memory / STAGES / size)
        return min(MOST_SLOTS, max(LEAST_LINES, 1 << (most.bit_length() - 1)))
