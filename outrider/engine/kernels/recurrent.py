"""Parts that kernels of recurrent layers share: sources of a StateProgram, records and tails of a pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.cache.recurrent_states import LayerStates
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
LARGE = tl.constexpr(20.0)  # softplus of a larger number is the number itself, as in torch
COPIED = 1024  # channels that a program copies


@triton.jit
def taken(source, channel, is_there, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows):
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
def convolved(
    operation,
    channel,
    is_there,
    taps,
    bias,
    fed,
    fed_stride,
    ring,
    tails,
    channels,
    ring_rows,
    tail_rows,
    TAPS: tl.constexpr,
):
    """Returns the silu of the convolution; both are rounded to the records' type, as in torch.

    bias: a pointer, or None
    """
    total = channel.to(tl.float32) * 0.0
    for tap in tl.static_range(TAPS):
        source = tl.load(operation + SOURCES + tap)
        number = taken(
            source, channel, is_there, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows
        )
        total += tl.load(taps + tap * channels + channel, mask=is_there, other=0.0) * number
    if bias is not None:
        total += tl.load(bias + channel, mask=is_there, other=0.0)
    total = total.to(fed.dtype.element_ty).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(fed.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["ring_rows", "tail_rows"])
def copy_sources(
    fed, ring, tails, sources, copies, fed_stride, channels, ring_rows, tail_rows, COPIED: tl.constexpr
):
    """Copies channels of each source (see ``taken``) to its row of copies [sources, channels]."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    is_there = channel < channels
    source = tl.load(sources + row)
    number = taken(source, channel, is_there, fed, fed_stride, ring, tails, channels, ring_rows, tail_rows)
    tl.store(copies + row * channels + channel, number.to(copies.dtype.element_ty), mask=is_there)


def rows_of(memory: LayerStates) -> tuple[int, int]:
    """Returns the arguments ``ring_rows`` and ``tail_rows`` of the kernels."""
    return memory.records.shape[:2].numel(), memory.tails.shape[:3].numel()


def store_records(program: StateProgram, fed: Tensor, memory: LayerStates) -> None:
    """Writes tails and records of a pass, whose states are written already. fed: [num_tokens, record]."""
    ring, tails = memory.records, memory.tails
    if len(program.sources):
        channels = tails.shape[3]
        copies = torch.empty(len(program.sources), channels, dtype=tails.dtype, device=tails.device)
        copy_sources[(len(copies), triton.cdiv(channels, COPIED))](
            fed, ring, tails, program.sources, copies, fed.shape[1], channels, *rows_of(memory), COPIED=COPIED
        )
        new = copies.view(-1, *tails.shape[2:])
        tails.flatten(0, 1)[program.written] = new[: len(program.written)]
        if len(program.kept):
            memory.kept_tails[program.kept] = new[len(program.written) :]
    ring.flatten(0, 1)[program.ring] = fed[program.ringed]
