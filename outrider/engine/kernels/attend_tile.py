"""Attention of one tile of queries over the paged cache, as a Triton kernel.

A tile is consecutive queries of a sequence in the batch. Query heads that share a key/value head are computed
together, so that the cache is read once for all of them.

In latent attention all query heads share a key/value head, whose value is a part of its key. A program then
reads each key once. The rows and heads of a tile would need too many registers together, so they are cut
into pieces of work.

Few queries over a long context would leave most of a GPU idle. So their context is divided into parts, whose
results are combined by their weights (Dao et al., "Flash-Decoding for long-context inference", 2023). The
bounds of parts depend on nothing but the position. If a tile's context is a large share of a step's contexts,
the tile is split: each part is a program's work, and a second kernel combines the parts. Otherwise a single
program reads all parts and combines them itself, by the same arithmetic in the same order, without writing
them to memory.

Masked slots change no bit of a result, so a row's output does not depend on its tile or its batch. If drafted
ancestors are read in the order of a chain, their places among other nodes do not matter either.
"""

import triton
import triton.language as tl

from outrider.engine.kernels.joined_parts import LOG2_E, begin_of, joined, num_parts_of, output_of
from outrider.engine.kernels.narrow import widened

STAGES = 2  # pipeline stages of prefetching
AHEAD = tl.constexpr(STAGES)
WORD_BITS = tl.constexpr(64)  # bits of a word of PagedInput.ancestors


@triton.jit(do_not_specialize=["rows", "table_stride", "words", "path_length", "splits"])
def attend_tile(
    query,  # [heads, rows, key_dim], by strides
    keys,  # [slots, kv_heads, key_dim], uint8 in a narrow cache
    values,  # [slots, kv_heads, value_dim], same type as keys; not read if a value is a part of its key
    block_tables,  # int32 [sequences, table_stride]
    windowed,  # int32 [blocks] with WINDOWED: block of this layer by block of the block tables
    tiles,  # int64 [num_tiles, TILE_FIELDS]
    work,  # int64 [5] numbers of PagedInput.work, read if contexts have parts
    seen,  # int64 [rows] number of leading slots that are all visible
    ancestors,  # int64 [rows, words] bits of the nodes, from the root on, that are also visible
    paths,  # int64 [rows, path_length] with CHAINS: nodes up to the row's own, if its tile has a root
    positions,  # int64 [rows]
    sinks,  # [heads]
    output,  # [rows, heads, value_dim]
    parts,  # float32 [split tiles * FEW_TILE, heads, splits, value_dim] weighted values
    weights,  # float32 [split tiles * FEW_TILE, heads, splits, 2] largest scores, and sums of weights
    rows,
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
    REPEATS: tl.constexpr,  # query heads per kv head
    GROUP: tl.constexpr,  # query heads that are computed together
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTATED: tl.constexpr,  # last numbers of a key, all before which are its value; 0: keys have no values
    KEY_WIDTH: tl.constexpr,  # a power of two, at least the numbers of a key that are not rotated
    VALUE_WIDTH: tl.constexpr,
    ROTATED_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # slots of a cache block
    FIELDS: tl.constexpr,
    M: tl.constexpr,  # lines (a row and a query head each) that are computed together; a power of two
    CUTS: tl.constexpr,  # pieces of M lines into which a group's lines of a tile are cut
    SPLIT: tl.constexpr,  # split tiles for whose partial results there is memory
    N: tl.constexpr,  # slots that are read at a time
    TILE: tl.constexpr,  # rows of a tile, at most
    THIRD: tl.constexpr,  # slots of a part of the third length; 0: contexts have no parts
    WINDOW: tl.constexpr,
    WINDOWED: tl.constexpr,  # whether the layer keeps only blocks that a window reaches
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINS: tl.constexpr,  # whether a row's drafted ancestors are read as if they were a chain
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1) * GROUP // REPEATS
    # Each tile of a prompt has its own program, and padding has no slots. Reading the number of tiles from
    # memory would occupy a register until the end, and prompts need all registers.
    pieces = tl.num_programs(0) // CUTS
    if THIRD > 0:
        # A captured grid has to fit every batch. Launching programs without work would take longer than the
        # work itself, so few programs share all pieces.
        num_tiles = tl.load(work).to(tl.int32)
        num_split = tl.minimum(tl.load(work + 1).to(tl.int32), SPLIT)
        num_parts = num_parts_of(tl.load(work + 2).to(tl.int32), THIRD)
        split_pieces = num_split * num_parts
        pieces = split_pieces + num_tiles - num_split
    for turn in range(tl.program_id(0), pieces * CUTS, tl.num_programs(0)):
        piece, lines = turn, tl.arange(0, M)
        if CUTS > 1:
            # First cuts come first, because tiles of few rows have no further cuts. Queries of many heads in
            # a long prompt take more numbers than 32 bit can count.
            piece, lines = turn % pieces, (turn // pieces * M + lines).to(tl.int64)
        number, part = piece, 0
        if THIRD > 0:
            # The last parts are the longest, so they are scheduled first.
            is_split = piece < split_pieces
            divisor = tl.maximum(num_split, 1)
            number = tl.where(is_split, piece % divisor, piece - split_pieces + num_split)
            part = tl.where(is_split, num_parts - 1 - piece // divisor, 0)
        tile = tiles + number * FIELDS
        lane, first, count, end, root = (
            tl.load(tile).to(tl.int32),
            tl.load(tile + 1).to(tl.int32),
            tl.load(tile + 2).to(tl.int32),
            tl.load(tile + 3).to(tl.int32),
            tl.load(tile + 4).to(tl.int32),
        )
        if CUTS > 1:
            end = tl.where(turn // pieces * M < count * GROUP, end, 0)
        begin = 0
        if THIRD > 0:
            begin = begin_of(part, THIRD)
        if begin < end:
            stop = end
            if THIRD > 0:
                stop = tl.minimum(end, tl.where(is_split, begin_of(part + 1, THIRD), end))
            row = first + lines // GROUP
            query_head = tl.program_id(1) * GROUP + lines % GROUP
            real = lines // GROUP < count
            of_key, of_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
            has_key, has_value = of_key < KEY_DIM - ROTATED, of_value < VALUE_DIM
            at = query + query_head[:, None] * query_head_stride + row[:, None] * query_row_stride
            q = tl.load(at + of_key[None, :], mask=real[:, None] & has_key[None, :], other=0.0)
            if ROTATED > 0:
                of_rotated = VALUE_DIM + tl.arange(0, ROTATED_WIDTH)
                has_rotated = of_rotated < KEY_DIM
                q_rotated = tl.load(
                    at + of_rotated[None, :], mask=real[:, None] & has_rotated[None, :], other=0.0
                )
            sees = tl.load(seen + row, mask=real, other=0).to(tl.int32)
            position = tl.load(positions + row, mask=real, other=0).to(tl.int32)
            least = tl.min(tl.where(real, sees, 1 << 30), 0)  # slots that every row sees
            oldest = 0
            if WINDOW:
                oldest = tl.maximum(tl.min(tl.where(real, position, 1 << 30), 0) - window + 1, 0)
                if THIRD > 0:  # parts before the window change no bit and are skipped
                    part = tl.where(is_split, part, num_parts_of(oldest + 1, THIRD) - 1)
                    begin = begin_of(part, THIRD)
            if CHAINS:
                least = tl.minimum(least, root)  # from the root on slots are looked up
            unit = LOG2_E if SOFTCAP else scale * LOG2_E
            all_largest = tl.full((M,), float("-inf"), tl.float32)
            all_total = tl.zeros((M,), tl.float32)
            all_summed = tl.zeros((M, VALUE_WIDTH), tl.float32)
            while begin < stop:
                part_end = stop
                if THIRD > 0:
                    part_end = tl.minimum(stop, begin_of(part + 1, THIRD))
                start = begin
                plain_end = tl.maximum(begin, tl.minimum(least, part_end) // N * N)
                if WINDOW:
                    start = tl.maximum(begin, oldest // N * N)
                    plain_end = start  # every block is masked slot by slot
                largest = tl.full((M,), float("-inf"), tl.float32)
                total = tl.zeros((M,), tl.float32)
                summed = tl.zeros((M, VALUE_WIDTH), tl.float32)
                for place in range(start, plain_end, N):
                    slots = place + tl.arange(0, N)
                    block = tl.load(block_tables + lane * table_stride + slots // BLOCK).to(tl.int64)
                    slot = (block * BLOCK + slots % BLOCK) * KV_HEADS + head
                    k = tl.load(
                        keys + slot[None, :] * KEY_DIM + of_key[:, None], mask=has_key[:, None], other=0.0
                    )
                    k = widened(k, q.dtype)
                    scores = tl.dot(q, k, input_precision=PRECISION)
                    if ROTATED > 0:
                        k_rotated = tl.load(
                            keys + slot[None, :] * KEY_DIM + of_rotated[:, None],
                            mask=has_rotated[:, None],
                            other=0.0,
                        )
                        k_rotated = widened(k_rotated, q.dtype)
                        scores = tl.dot(q_rotated, k_rotated, scores, input_precision=PRECISION)
                    if SOFTCAP:
                        scores = _capped(scores * scale, softcap)
                    # Subtract before scaling: then the loops with and without masks round alike.
                    new = tl.maximum(largest, tl.max(scores, 1))
                    fade = tl.exp2((largest - new) * unit)
                    probs = tl.exp2((scores - new[:, None]) * unit)
                    total = total * fade + tl.sum(probs, 1)
                    if ROTATED > 0:
                        v = tl.trans(k)
                    else:
                        v = tl.load(
                            values + slot[:, None] * VALUE_DIM + of_value[None, :],
                            mask=has_value[None, :],
                            other=0.0,
                        )
                    summed = tl.dot(
                        probs.to(q.dtype),
                        widened(v, q.dtype),
                        summed * fade[:, None],
                        input_precision=PRECISION,
                    )
                    largest = new
                # Without a window these are few slots, and prefetching them would only take registers.
                for place in tl.range(plain_end, part_end, N, num_stages=AHEAD if WINDOW else 1):
                    slots = place + tl.arange(0, N)
                    inside = slots < part_end
                    if WINDOWED:  # slots before every window may belong to another sequence
                        inside = inside & (slots >= tl.minimum(oldest, root))
                    held = slots
                    if CHAINS:
                        drafted = inside & (slots >= root)
                        path = paths + first * path_length + tl.where(drafted, slots - root, 0)
                        held = tl.where(
                            drafted, root + tl.load(path, mask=drafted, other=0).to(tl.int32), slots
                        )
                    block = tl.load(block_tables + lane * table_stride + held // BLOCK, mask=inside, other=0)
                    if WINDOWED:
                        block = tl.load(windowed + block, mask=inside, other=0)
                    slot = (block.to(tl.int64) * BLOCK + held % BLOCK) * KV_HEADS + head
                    k = tl.load(
                        keys + slot[None, :] * KEY_DIM + of_key[:, None],
                        mask=inside[None, :] & has_key[:, None],
                        other=0.0,
                    )
                    k = widened(k, q.dtype)
                    scores = tl.dot(q, k, input_precision=PRECISION)
                    if ROTATED > 0:
                        k_rotated = tl.load(
                            keys + slot[None, :] * KEY_DIM + of_rotated[:, None],
                            mask=inside[None, :] & has_rotated[:, None],
                            other=0.0,
                        )
                        k_rotated = widened(k_rotated, q.dtype)
                        scores = tl.dot(q_rotated, k_rotated, scores, input_precision=PRECISION)
                    if SOFTCAP:
                        scores = _capped(scores * scale, softcap)
                    visible = slots[None, :] < sees[:, None]
                    if not CHAINS and place + N > root:
                        for span in tl.static_range(0, N, WORD_BITS):
                            bits = _visible_nodes(ancestors + row * words, place - root + span, words, real)
                            column = tl.arange(0, N)[None, :] - span
                            is_own = (column >= 0) & (column < WORD_BITS)
                            bit = bits[:, None] >> tl.where(is_own, column, 0).to(tl.uint64)
                            visible = visible | (is_own & ((bit & 1) != 0))
                    if WINDOW:
                        near = slots[None, :] > position[:, None] - window
                        visible = visible & (near if CHAINS else near | (slots >= root)[None, :])
                    scores = tl.where(visible & inside[None, :] & real[:, None], scores, float("-inf"))
                    new = tl.maximum(largest, tl.max(scores, 1))
                    finite = tl.where(new == float("-inf"), 0.0, new)  # no slot is visible so far
                    fade = tl.exp2((largest - finite) * unit)
                    probs = tl.exp2((scores - finite[:, None]) * unit)
                    total = total * fade + tl.sum(probs, 1)
                    if ROTATED > 0:
                        v = tl.trans(k)
                    else:
                        v = tl.load(
                            values + slot[:, None] * VALUE_DIM + of_value[None, :],
                            mask=inside[:, None] & has_value[None, :],
                            other=0.0,
                        )
                    summed = tl.dot(
                        probs.to(q.dtype),
                        widened(v, q.dtype),
                        summed * fade[:, None],
                        input_precision=PRECISION,
                    )
                    largest = new
                if THIRD > 0:
                    all_largest, all_total, all_summed = joined(
                        all_largest, all_total, all_summed, largest, total, summed, unit
                    )
                else:
                    all_largest, all_total, all_summed = largest, total, summed
                begin = part_end
                part += 1
            written = real[:, None] & has_value[None, :]
            if THIRD > 0 and is_split:
                held = (number * TILE + lines // GROUP) * KV_HEADS * REPEATS + query_head
                at_part = held.to(tl.int64) * splits + part - 1
                tl.store(parts + at_part[:, None] * VALUE_DIM + of_value[None, :], all_summed, mask=written)
                tl.store(weights + 2 * at_part, all_largest, mask=real)
                tl.store(weights + 2 * at_part + 1, all_total, mask=real)
            else:
                given = output_of(all_largest, all_total, all_summed, unit, sinks, query_head, SINKS)
                to = row * KV_HEADS * REPEATS + query_head
                tl.store(
                    output + to[:, None] * VALUE_DIM + of_value[None, :],
                    given.to(output.dtype.element_ty),
                    mask=written,
                )
    if THIRD > 0:
        of_value, num_rows = tl.arange(0, VALUE_WIDTH), tl.load(work + 3).to(tl.int32)
        padding = (rows - num_rows) * GROUP
        for first_line in range(tl.program_id(0) * M, padding, tl.num_programs(0) * M):
            lines = first_line + tl.arange(0, M)
            row, query_head = num_rows + lines // GROUP, tl.program_id(1) * GROUP + lines % GROUP
            to = row * KV_HEADS * REPEATS + query_head
            zeros = tl.zeros((M, VALUE_WIDTH), output.dtype.element_ty)
            at = output + to[:, None] * VALUE_DIM + of_value[None, :]
            tl.store(at, zeros, mask=(lines < padding)[:, None] & (of_value < VALUE_DIM)[None, :])


@triton.jit
def _visible_nodes(ancestors, first, words, real):
    """Returns WORD_BITS bits of each line, uint64: which of the nodes from ``first`` on the line sees.

    A mask that is loaded slot by slot would take most of a thread's registers.

    ancestors: [lines] pointers to the words of each line's row. first: number of a node; below 0 for slots
    before the root.
    """
    word, shift = tl.where(real, first >> 6, -2), (first & 63).to(tl.uint64)
    before = tl.load(ancestors + word, mask=(word >= 0) & (word < words), other=0)
    after = tl.load(ancestors + word + 1, mask=(word >= -1) & (word < words - 1), other=0)
    low = before.to(tl.uint64, bitcast=True) >> shift
    return low | ((after.to(tl.uint64, bitcast=True) << 1) << (63 - shift))


@triton.jit
def _capped(scores, softcap):
    """Returns softcap * tanh(scores / softcap)."""
    faded = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
    tanh = (1.0 - faded) / (1.0 + faded)
    return softcap * tl.where(scores < 0, -tanh, tanh)
