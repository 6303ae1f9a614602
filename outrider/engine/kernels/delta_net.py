"""Gated DeltaNet on a GPU: a program keeps part of a head's state in registers and updates it token by token.

A token's arithmetic is that of outrider/engine/forward/delta_net.py and does not depend on other sequences. A
StateProgram (outrider/engine/inputs/state_program.py) lists the tokens to compute and where numbers are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.inputs import state_program
from outrider.engine.inputs.state_program import StateProgram

ROW, KEEP, FLAGS = (
    tl.constexpr(field) for field in (state_program.ROW, state_program.KEEP, state_program.FLAGS)
)
SOURCES, NUM_SEQUENCE_FIELDS = (
    tl.constexpr(number) for number in (state_program.SOURCES, state_program.SEQUENCE_FIELDS)
)
BEGINS_AT_ROOT, IS_ROOT, IS_STORED = (
    tl.constexpr(flag)
    for flag in (state_program.BEGINS_AT_ROOT, state_program.IS_ROOT, state_program.IS_STORED)
)
EPSILON = tl.constexpr(1e-6)  # added to the squared length of queries and keys, as transformers does
LARGE = tl.constexpr(20.0)  # softplus of a larger number is the number itself, as in torch
WARPS = 4  # groups of 32 threads
VALUES = 16  # value dimensions of a program; with 128 key dimensions a thread holds 16 numbers
COPIED = 1024  # channels that a program copies


@triton.jit
def _taken(source, channel, is_there, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows):
    """Returns channels of a source: a fed record, a record in a ring, a row of a tail, or zeros."""
    code = -1 - source
    is_fed = tl.where(is_there, source, -1) >= 0
    own = tl.where(is_there, code, -1)
    is_ring = (own >= 0) & (own < ring_rows)
    is_tail = (own >= ring_rows) & (own < ring_rows + tail_rows)
    of_fed = tl.load(fed + source * fed_stride + channel, mask=is_fed, other=0.0)
    of_ring = tl.load(ring + code * fed_stride + channel, mask=is_ring, other=0.0)
    of_tail = tl.load(tails + (code - ring_rows) * channels + channel, mask=is_tail, other=0.0)
    return of_fed.to(tl.float32) + of_ring.to(tl.float32) + of_tail.to(tl.float32)


@triton.jit
def _convolved(
    operation,
    channel,
    is_there,
    taps,
    fed,
    fed_stride,
    ring,
    tails,
    channels,
    ring_rows,
    tail_rows,
    TAPS: tl.constexpr,
):
    """Returns the silu of the convolution; both are rounded to the records' type, as in torch."""
    total = channel.to(tl.float32) * 0.0
    for tap in tl.static_range(TAPS):
        source = tl.load(operation + SOURCES + tap)
        taken = _taken(
            source, channel, is_there, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows
        )
        total += tl.load(taps + tap * channels + channel, mask=is_there, other=0.0) * taken
    total = total.to(fed.dtype.element_ty).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(fed.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["ring_rows", "tail_rows"])
def advance_states(
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
        query = _convolved(
            operation,
            query_channel,
            is_key,
            taps,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        keys = _convolved(
            operation,
            key_channel,
            is_key,
            taps,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        values = _convolved(
            operation,
            value_channel,
            is_value,
            taps,
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
        beta = _taken(
            own, channels + head, is_own, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows
        )
        decay = _taken(
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


@triton.jit(do_not_specialize=["ring_rows", "tail_rows"])
def copy_sources(
    fed, ring, tails, sources, copies, fed_stride, channels, ring_rows, tail_rows, COPIED: tl.constexpr
):
    """Copies channels of each source (see ``_taken``) to its row of copies [sources, channels]."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    is_there = channel < channels
    source = tl.load(sources + row)
    taken = _taken(source, channel, is_there, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows)
    tl.store(copies + row * channels + channel, taken.to(copies.dtype.element_ty), mask=is_there)


def advance(
    program: StateProgram,
    fed: Tensor,
    output: Tensor,
    states: Tensor,
    tails: Tensor,
    ring: Tensor,
    kept: tuple[Tensor, Tensor],
    taps: Tensor,
    gates: tuple[Tensor, Tensor],
) -> None:
    """Computes a layer's recurrence for a pass; writes rows of output, states, tails and records.

    Args:
        fed: [num_tokens, record] records of the pass.
        output: [num_tokens, heads, value_dim].
        states, tails, ring: the layer's parts of RecurrentStates.
        kept: the layer's kept states and tails.
        taps: float32 [taps, channels] weights of the convolution.
        gates: float32 [heads] each: slope and shift of the decay.
    """
    kept_states, kept_tails = kept
    *_, key_heads, repeats, key_dim, value_dim = states.shape
    count, channels = taps.shape
    rows = ring.shape[0] * ring.shape[1], tails.shape[0] * tails.shape[1] * tails.shape[2]
    width = min(VALUES, triton.next_power_of_2(value_dim))
    grid = (len(program.sequences), key_heads * repeats, triton.cdiv(value_dim, width))
    advance_states[grid](
        fed,
        ring,
        tails,
        states,
        kept_states,
        output,
        program.sequences,
        program.operations,
        taps,
        *gates,
        fed.shape[1],
        channels,
        *rows,
        HEADS=key_heads * repeats,
        REPEATS=repeats,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_WIDTH=triton.next_power_of_2(key_dim),
        VALUE_WIDTH=width,
        TAPS=count,
        num_warps=WARPS,
    )
    if len(program.sources):
        copies = torch.empty(len(program.sources), channels, dtype=tails.dtype, device=tails.device)
        copy_sources[(len(copies), triton.cdiv(channels, COPIED))](
            fed, ring, tails, program.sources, copies, fed.shape[1], channels, *rows, COPIED=COPIED
        )
        new = copies.view(-1, *tails.shape[2:])
        tails.flatten(0, 1)[program.written] = new[: len(program.written)]
        if len(program.kept):
            kept_tails[program.kept] = new[len(program.written) :]
    ring.flatten(0, 1)[program.ring] = fed[program.ringed]
