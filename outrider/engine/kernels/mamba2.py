"""Mamba-2 on a GPU: a program keeps part of a head's state in registers and updates it token by token.

A token's arithmetic is that of outrider/engine/forward/mamba2.py and does not depend on other sequences. A
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

WARPS = 4  # groups of 32 threads
INPUTS = 16  # input dimensions of a program; with a state size of 128 a thread holds 16 numbers


@triton.jit
def _softplus(number):
    """Returns log(1 + exp(number)), exact to rounding for small results too."""
    grown = tl.exp(tl.minimum(number, LARGE))
    total = 1.0 + grown
    added = total - 1.0  # ``grown`` as the sum has rounded it; the logarithm is scaled by their quotient
    small = tl.where(added == 0.0, grown, grown * (tl.log(total) / tl.where(added == 0.0, 1.0, added)))
    return tl.where(number > LARGE, number, small)


@triton.jit(do_not_specialize=["ring_rows", "tail_rows"])
def advance_mamba2(
    fed,  # [num_tokens, fed_stride] records of the pass
    ring,  # [ring_rows, fed_stride] records of earlier tokens
    tails,  # [tail_rows, channels] inputs of the convolution at the tokens before the next token
    states,  # float32 [states, HEADS, STATE_SIZE, HEAD_DIM]
    kept,  # float32 [kept states, HEADS, STATE_SIZE, HEAD_DIM]
    output,  # [num_tokens, HEADS, HEAD_DIM]
    sequences,  # int64 [sequences, SEQUENCE_FIELDS]
    operations,  # int64 [operations, SOURCES + TAPS]
    taps,  # float32 [TAPS, channels]
    bias,  # float32 [channels], or None
    slope,  # float32 [HEADS]
    shift,  # float32 [HEADS]
    skip,  # float32 [HEADS]
    least_step,
    most_step,
    fed_stride,
    channels,
    ring_rows,
    tail_rows,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    DIM_WIDTH: tl.constexpr,  # power of 2
    SIZE_WIDTH: tl.constexpr,  # power of 2
    TAPS: tl.constexpr,
):
    """Computes the tokens of a sequence, for a head and some of its input dimensions."""
    sequence = sequences + tl.program_id(0) * NUM_SEQUENCE_FIELDS
    first, count = tl.load(sequence), tl.load(sequence + 1)
    begun, written = tl.load(sequence + 2), tl.load(sequence + 3)
    head = tl.program_id(1)
    line, dim = tl.arange(0, SIZE_WIDTH), tl.program_id(2) * DIM_WIDTH + tl.arange(0, DIM_WIDTH)
    is_line, is_dim = line < STATE_SIZE, dim < HEAD_DIM
    is_there = is_line[:, None] & is_dim[None, :]
    place = (head * STATE_SIZE + line[:, None]) * HEAD_DIM + dim[None, :]
    of_state = HEADS * STATE_SIZE * HEAD_DIM
    input_channel = head * HEAD_DIM + dim
    writing_channel = HEADS * HEAD_DIM + (head // REPEATS) * STATE_SIZE + line
    reading_channel = (HEADS // REPEATS) * STATE_SIZE + writing_channel
    own_slope, own_shift, own_skip = tl.load(slope + head), tl.load(shift + head), tl.load(skip + head)
    state = tl.load(states + begun * of_state + place, mask=tl.where(is_there, begun, -1) >= 0, other=0.0)
    root = state
    for number in range(first, first + count):
        operation = operations + number * (SOURCES + TAPS)
        row, keep, flags = tl.load(operation + ROW), tl.load(operation + KEEP), tl.load(operation + FLAGS)
        state = tl.where((flags & BEGINS_AT_ROOT) != 0, root, state)
        inputs = convolved(
            operation,
            input_channel,
            is_dim,
            taps,
            bias,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        writing = convolved(
            operation,
            writing_channel,
            is_line,
            taps,
            bias,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        reading = convolved(
            operation,
            reading_channel,
            is_line,
            taps,
            bias,
            fed,
            fed_stride,
            ring,
            tails,
            channels,
            ring_rows,
            tail_rows,
            TAPS,
        )
        own = tl.load(operation + SOURCES + TAPS - 1)
        step = taken(
            own, channels + head, own == own, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows
        )
        step = tl.minimum(tl.maximum(_softplus(step + own_shift), least_step), most_step)
        state = state * tl.exp(own_slope * step) + writing[:, None] * (inputs * step)[None, :]
        found = tl.sum(state * reading[:, None], 0) + inputs * own_skip
        of_row = output + (row * HEADS + head) * HEAD_DIM + dim
        tl.store(of_row, found.to(output.dtype.element_ty), mask=tl.where(is_dim, row, -1) >= 0)
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
    convolution: tuple[Tensor, Tensor | None],
    of_heads: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float],
) -> None:
    """Computes a layer's recurrence for a pass; writes rows of output, states, tails and records.

    Args:
        fed: [num_tokens, record] records of the pass.
        output: [num_tokens, heads, head_dim].
        memory: the layer's states.
        convolution: float32 weights [taps, channels] and biases [channels]; None: it has no biases.
        of_heads: float32 [heads] each: slope of the decay, shift of the time steps, factor of the inputs.
        limits: shortest and longest time step.
    """
    *_, groups, repeats, state_size, head_dim = memory.states.shape
    taps, bias = convolution
    width = min(INPUTS, triton.next_power_of_2(head_dim))
    grid = (len(program.sequences), groups * repeats, triton.cdiv(head_dim, width))
    advance_mamba2[grid](
        fed,
        memory.records,
        memory.tails,
        memory.states,
        memory.kept_states,
        output,
        program.sequences,
        program.operations,
        taps,
        bias,
        *of_heads,
        *limits,
        fed.shape[1],
        taps.shape[1],
        *rows_of(memory),
        HEADS=groups * repeats,
        REPEATS=repeats,
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        DIM_WIDTH=width,
        SIZE_WIDTH=triton.next_power_of_2(state_size),
        TAPS=len(taps),
        num_warps=WARPS,
    )
    store_records(program, fed, memory)
