"""Gated DeltaNet on a GPU: a program keeps part of a head's state in registers and updates it token by token.

A token's arithmetic is that of outrider/engine/forward/delta_net.py and does not depend on other sequences. A
StateProgram (outrider/engine/inputs/state_program.py) lists the tokens to compute and where numbers are read.
"""

import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.cache.recurrent_states import LayerStates
from outrider.engine.inputs.state_program import StateProgram
from outrider.engine.kernels.recurrent import (
    BEGINS_AT_ROOT,
    FLAGS,
    IS_ROOT,
    IS_STORED,
    KEEP,
    LARGE,
    NUM_SEQUENCE_FIELDS,
    ROW,
    SOURCES,
    convolved,
    rows_of,
    store_records,
    taken,
)

EPSILON = tl.constexpr(1e-6)  # added to the squared length of queries and keys, as transformers does
WARPS = 4  # groups of 32 threads
VALUES = 16  # value dimensions of a program; with 128 key dimensions a thread holds 16 numbers


@triton.jit(do_not_specialize=["ring_rows", "tail_rows"])
def advance_delta_nets(
    fed,  # [num_tokens, fed_stride] records of the pass
    ring,  # [ring_rows, fed_stride] records of earlier tokens
    tails,  # [tail_rows, channels] inputs of the convolution at the tokens before the next token
    states,  # float32 [states, HEADS, KEY_DIM, VALUE_DIM]
    kept,  # float32 [kept states, HEADS, KEY_DIM, VALUE_DIM]
    output,  # [num_tokens, HEADS, VALUE_DIM]
    sequences,  # int64 [sequences, SEQUENCE_FIELDS]
    operations,  # int64 [operations, SOURCES + TAPS]
    taps,  # float32 [TAPS, channels]
    slope,  # float32 [HEADS]
    shift,  # float32 [HEADS]
    fed_stride,
    channels,
    ring_rows,
    tail_rows,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,  # power of 2
    VALUE_WIDTH: tl.constexpr,  # power of 2
    TAPS: tl.constexpr,
):
    """Computes the tokens of a sequence, for a head and some of its value dimensions."""
    sequence = sequences + tl.program_id(0) * NUM_SEQUENCE_FIELDS
    first, count = tl.load(sequence), tl.load(sequence + 1)
    begun, written = tl.load(sequence + 2), tl.load(sequence + 3)
    head = tl.program_id(1)
    key, value = tl.arange(0, KEY_WIDTH), tl.program_id(2) * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    is_there = is_key[:, None] & is_value[None, :]
    place = (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    of_state = HEADS * KEY_DIM * VALUE_DIM
    query_channel = (head // REPEATS) * KEY_DIM + key
    key_channel = (HEADS // REPEATS) * KEY_DIM + query_channel
    value_channel = 2 * (HEADS // REPEATS) * KEY_DIM + head * VALUE_DIM + value
    own_slope, own_shift = tl.load(slope + head), tl.load(shift + head)
    state = tl.load(states + begun * of_state + place, mask=tl.where(is_there, begun, -1) >= 0, other=0.0)
    root = state
    for number in range(first, first + count):
        operation = operations + number * (SOURCES + TAPS)
        row, keep, flags = tl.load(operation + ROW), tl.load(operation + KEEP), tl.load(operation + FLAGS)
        state = tl.where((flags & BEGINS_AT_ROOT) != 0, root, state)
        query = convolved(
            operation,
            query_channel,
            is_key,
            taps,
            None,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        keys = convolved(
            operation,
            key_channel,
            is_key,
            taps,
            None,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        values = convolved(
            operation,
            value_channel,
            is_value,
            taps,
            None,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        query = query * tl.rsqrt(tl.sum(query * query, 0) + EPSILON)
        keys = keys * tl.rsqrt(tl.sum(keys * keys, 0) + EPSILON)
        own = tl.load(operation + SOURCES + TAPS - 1)
        is_own = own == own
        beta = taken(
            own, channels + head, is_own, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows
        )
        decay = taken(
            own, channels + HEADS + head, is_own, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows
        )
        decay += own_shift
        decay = tl.where(decay > LARGE, decay, tl.log(1.0 + tl.exp(tl.minimum(decay, LARGE))))
        state = state * tl.exp(own_slope * decay)
        held = tl.sum(state * keys[:, None], 0)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(fed.dtype.element_ty).to(tl.float32)
        state = state + keys[:, None] * ((values - held) * beta)[None, :]
        found = tl.sum(state * query[:, None], 0) * KEY_DIM**-0.5
        of_row = output + (row * HEADS + head) * VALUE_DIM + value
        tl.store(of_row, found.to(output.dtype.element_ty), mask=tl.where(is_value, row, -1) >= 0)
        tl.store(kept + keep * of_state + place, state, mask=tl.where(is_there, keep, -1) >= 0)
        tl.store(
            states + written * of_state + place, state, mask=tl.where(is_there, flags & IS_STORED, 0) != 0
        )
        root = tl.where((flags & IS_ROOT) != 0, state, root)


def advance(
    program: StateProgram,
    fed: Tensor,
    output: Tensor,
    memory: LayerStates,
    taps: Tensor,
    gates: tuple[Tensor, Tensor],
) -> None:
    """Computes a layer's recurrence for a pass; writes rows of output, states, tails and records.

    Args:
        fed: [num_tokens, record] records of the pass.
        output: [num_tokens, heads, value_dim].
        memory: the layer's states.
        taps: float32 [taps, channels] weights of the convolution.
        gates: float32 [heads] each: slope and shift of the decay.
    """
    *_, key_heads, repeats, key_dim, value_dim = memory.states.shape
    count, channels = taps.shape
    width = min(VALUES, triton.next_power_of_2(value_dim))
    grid = (len(program.sequences), key_heads * repeats, triton.cdiv(value_dim, width))
    advance_delta_nets[grid](
        fed,
        memory.records,
        memory.tails,
        memory.states,
        memory.kept_states,
        output,
        program.sequences,
        program.operations,
        taps,
        *gates,
        fed.shape[1],
        channels,
        *rows_of(memory),
        HEADS=key_heads * repeats,
        REPEATS=repeats,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_WIDTH=triton.next_power_of_2(key_dim),
        VALUE_WIDTH=width,
        TAPS=count,
        num_warps=WARPS,
    )
    store_records(program, fed, memory)
