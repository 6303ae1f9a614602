"""Chooses tokens on the device, in at most four kernel launches, without synchronizing with the host.

1. ``_scan`` reads each row once, in chunks. It finds the largest logit of each chunk and whether all logits
   are valid. It also finds the best tokens under the keyed noise, or statistics to bound the candidates of a
   row that a setting truncates.
2. ``_collect`` gathers the candidates of truncated rows: the few tokens above a lower bound of the cutoff.
3. ``_choose`` finds the exact cutoffs of top-k, top-p and min-p, and the best tokens of every row.
4. ``find_path``, in verdict.py, follows the best tokens through the Drafts to find the accepted nodes.

The settings have the meanings of outrider/decoding/truncation.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.inputs.choice_input import (
    BLOCK,
    CAPACITY,
    CHUNK,
    ChoiceInput,
    DraftRows,
    PackedRows,
)
from outrider.engine.kernels.cutoff import TILE, UNITS, load_ranks, lowest_rank, mass_of, rank_above, search
from outrider.engine.kernels.logits import LOWEST_RANK, load_logits, rank_of, token_of, value_of
from outrider.engine.kernels.noise import gumbel_at, gumbel_of_blocks
from outrider.engine.kernels.verdict import PROGRAM_ROWS, find_path

WARPS = 8

_SAFETY = tl.constexpr(0.01)  # logits; margin of a lower bound, larger than its rounding error
_HIGHEST = tl.constexpr(2**63 - 1)  # above the rank of any token
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).min)  # logit of a banned token
_INFINITY = tl.constexpr(math.inf)


Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # kernel, grid, arguments, constants


@dataclass(frozen=True)
class DeviceChoice:
    """Tokens that were chosen, on the device."""

    top_tokens: Tensor  # int32 [num_rows, ranks] best tokens under the keyed noise, best first
    perturbed: Tensor  # float32 [num_rows, ranks] their perturbed logits, -inf if banned
    are_valid: Tensor  # bool [num_rows] false if a logit is NaN or positive infinity, or none is finite
    # bool [num_rows] whether coupled verification accepts the row, if it is valid; [0] without Drafts
    are_accepted: Tensor


def choose_on_device(
    logits: Tensor, rows: PackedRows, ranks: int, allowed: Tensor | None = None
) -> DeviceChoice:
    """Applies temperature, top-k, top-p and min-p, and finds the best tokens under the keyed noise.

    Settings that change or ban single tokens must have been applied to the logits. The tokens of a row that
    is not valid are arbitrary. If ``rows`` have Drafts, their accepted nodes are found too.

    Args:
        logits: [num_rows, vocab_size] of any float type, each row contiguous; vocab_size is at most 2^19.
        ranks: number of best tokens to find per row, at most vocab_size; banned tokens come last.
        allowed: int32 [num_rows, ceil(vocab_size / 32)], a set bit for each token that may be chosen, the
            lowest bits first; None allows all tokens.
    """
    choice, launches = _planned(logits, rows, ranks, allowed)
    for kernel, grid, arguments, constants in launches:
        kernel[grid](*arguments, **constants)
    return choice


def joined(parts: Sequence[DeviceChoice], rows: PackedRows) -> DeviceChoice:
    """Concatenates the choices of consecutive parts of a batch.

    rows: rows of all parts. If they have Drafts, their accepted nodes are found.
    """
    top_tokens = torch.cat([part.top_tokens for part in parts])
    num_rows, ranks = top_tokens.shape
    are_accepted = torch.empty(num_rows if rows.depth else 0, dtype=torch.bool, device=top_tokens.device)
    if rows.depth:
        programs = (triton.cdiv(num_rows, PROGRAM_ROWS),)
        followed = (top_tokens, ranks, rows.drafts, num_rows, rows.depth, are_accepted)
        find_path[programs](*followed, BLOCK=PROGRAM_ROWS)
    perturbed = torch.cat([part.perturbed for part in parts])
    are_valid = torch.cat([part.are_valid for part in parts])
    return DeviceChoice(top_tokens, perturbed, are_valid, are_accepted)


def compile_choice(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels for all settings in advance, because a step would wait seconds for it.

    dtype: type of the model's logits. Logits to which settings of single tokens were applied are float32.
    """
    row = ChoiceContext(Sampling(top_k=2, top_p=0.5), 0, 0, (), ())
    everything = torch.empty(1, triton.cdiv(vocab_size, 32), dtype=torch.int32, device=device)
    rows = ChoiceInput.of_rows([row, row], DraftRows.of([Draft.chain((0,))], [2])).copied(device)
    for of_logits, allowed in ((dtype, None), (dtype, everything), (torch.float32, None)):
        logits = torch.empty(2, vocab_size, dtype=of_logits, device=device)
        _, launches = _planned(logits, rows, 1, allowed)
        for kernel, grid, arguments, constants in launches:
            kernel.warmup(*arguments, grid=grid, **constants)


def _planned(
    logits: Tensor, rows: PackedRows, ranks: int, allowed: Tensor | None
) -> tuple[DeviceChoice, list[Launch]]:
    """Returns the output tensors, and the kernel launches that fill them."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    id_bits = vocab_size.bit_length()
    capacity = max(CAPACITY, num_chunks * ranks)
    statistics = torch.empty(3, num_rows, num_chunks, device=device)
    block_maxima = torch.empty(num_rows, num_chunks * (CHUNK // BLOCK), dtype=torch.int64, device=device)
    candidates = torch.empty(num_rows, capacity, dtype=torch.int64, device=device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    top_tokens = torch.empty(num_rows, ranks, dtype=torch.int32, device=device)
    perturbed = torch.empty(num_rows, ranks, device=device)
    are_valid = torch.empty(num_rows, dtype=torch.bool, device=device)
    are_accepted = torch.empty(num_rows if rows.depth else 0, dtype=torch.bool, device=device)

    settings = rows.integers, rows.numbers
    read = (logits, logits.stride(0), allowed, *settings, num_rows, vocab_size)
    found = (statistics, candidates, counts, ranks)
    sizes = {"CAPACITY": capacity, "ID_BITS": id_bits, "num_warps": WARPS, "enable_fp_fusion": False}
    of_row = {"CHUNK": CHUNK, "BLOCK": BLOCK}
    of_chunks = {"CHUNKS": num_chunks, "CHUNKS_PADDED": triton.next_power_of_2(num_chunks)}
    in_chunks, by_chunk = (*read, *found, block_maxima), (num_rows, num_chunks)
    launches: list[Launch] = [(_scan, by_chunk, in_chunks, {**of_row, **sizes})]
    if rows.are_truncated:
        launches.append((_collect, by_chunk, in_chunks, {**of_row, **of_chunks, **sizes}))
    chosen = (top_tokens, perturbed, are_valid)
    launches.append((_choose, (num_rows,), (*read, *found, *chosen), {**of_chunks, **sizes}))
    if rows.depth:
        in_rows = (top_tokens, ranks, rows.drafts, num_rows, rows.depth, are_accepted)
        launches.append((find_path, (triton.cdiv(num_rows, PROGRAM_ROWS),), in_rows, {"BLOCK": PROGRAM_ROWS}))
    return DeviceChoice(top_tokens, perturbed, are_valid, are_accepted), launches


@triton.jit(do_not_specialize=["num_rows", "ranks"])
def _scan(
    logits,
    row_stride,
    allowed,
    integers,
    numbers,
    num_rows,
    vocab_size,
    statistics,
    candidates,
    counts,
    ranks,
    block_maxima,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    top_k, temperature, top_p, distance = load_settings(integers, numbers, num_rows, row)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values, are_faulty = load_logits(logits, row_stride, allowed, row, tokens, vocab_size, temperature)
    peak = tl.max(values)
    mass = 0.0
    if is_truncated(top_k, top_p, distance):
        mass = tl.sum(tl.exp(values - tl.maximum(peak, _SMALLEST)))
        tl.store(counts + row, 0)
        if top_k > 0:
            of_tokens = tl.where(tokens < vocab_size, rank_of(values, tokens, ID_BITS), LOWEST_RANK)
            blocks = (row * num_chunks + chunk) * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
            of_blocks = tl.max(tl.reshape(of_tokens, [CHUNK // BLOCK, BLOCK]), axis=1)
            tl.store(block_maxima + blocks, of_blocks)
    else:
        if tl.load(integers + 3 * num_rows + row) != 0:
            key, position = tl.load(integers + row), tl.load(integers + num_rows + row)
            values += gumbel_of_blocks(key, position, chunk * (CHUNK // 8), CHUNK // 8)
        perturbed = rank_of(tl.maximum(values, _SMALLEST), tokens, ID_BITS)
        perturbed = tl.where(tokens < vocab_size, perturbed, LOWEST_RANK)
        best = tl.max(perturbed)
        for place in range(ranks):
            tl.store(candidates + row.to(tl.int64) * CAPACITY + chunk * ranks + place, best)
            best = tl.max(tl.where(perturbed < best, perturbed, LOWEST_RANK))
    at = statistics + row * num_chunks + chunk
    tl.store(at, peak)
    tl.store(at + num_rows * num_chunks, mass)
    tl.store(at + 2 * num_rows * num_chunks, tl.max(are_faulty.to(tl.float32)))


@triton.jit(do_not_specialize=["num_rows", "ranks"])
def _collect(
    logits,
    row_stride,
    allowed,
    integers,
    numbers,
    num_rows,
    vocab_size,
    statistics,
    candidates,
    counts,
    ranks,
    block_maxima,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    top_k, temperature, top_p, distance = load_settings(integers, numbers, num_rows, row)
    if is_truncated(top_k, top_p, distance):
        peak, mass, _ = _load_statistics(statistics, row, num_rows, CHUNKS, CHUNKS_PADDED)
        bound = peak + distance
        if top_k > 0:
            # The k-th largest block maximum is a lower bound: at least k tokens reach it.
            num_blocks: tl.constexpr = CHUNKS * (CHUNK // BLOCK)
            of_row = block_maxima + row * num_blocks
            source = (of_row, num_blocks, logits, row_stride, allowed, row, vocab_size, temperature, True)
            bound = value_of(
                search(lowest_rank(ID_BITS), rank_above(peak, ID_BITS), top_k, peak, source, False, ID_BITS),
                ID_BITS,
            )
        elif top_p < 1.0:
            # All tokens below this bound together have less mass than top-p leaves out.
            left_out = ((1.0 - top_p) * mass / vocab_size).to(tl.float32)
            bound = tl.maximum(bound, peak + tl.log(left_out) - _SAFETY)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values, _ = load_logits(logits, row_stride, allowed, row, tokens, vocab_size, temperature)
        # If fewer than ``ranks`` tokens may be chosen, the first tokens of the vocabulary fill up the ranks.
        picked = (tokens < vocab_size) & ((values >= bound) | (tokens < ranks))
        count = tl.sum(picked.to(tl.int32))
        places = tl.atomic_add(counts + row, count) + tl.cumsum(picked.to(tl.int32)) - 1
        tl.store(
            candidates + row.to(tl.int64) * CAPACITY + places,
            rank_of(values, tokens, ID_BITS),
            mask=picked & (places < CAPACITY),
        )


@triton.jit(do_not_specialize=["num_rows", "ranks"])
def _choose(
    logits,
    row_stride,
    allowed,
    integers,
    numbers,
    num_rows,
    vocab_size,
    statistics,
    candidates,
    counts,
    ranks,
    top_tokens,
    perturbed,
    are_valid,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    top_k, temperature, top_p, distance = load_settings(integers, numbers, num_rows, row)
    peak, mass, is_valid = _load_statistics(statistics, row, num_rows, CHUNKS, CHUNKS_PADDED)
    tl.store(are_valid + row, is_valid)
    is_cut = is_truncated(top_k, top_p, distance)
    length = CHUNKS * ranks
    if is_cut:
        length = tl.load(counts + row)
    are_collected = length <= CAPACITY
    if not are_collected:
        length = vocab_size
    of_row = candidates + row.to(tl.int64) * CAPACITY
    source = (of_row, length, logits, row_stride, allowed, row, vocab_size, temperature, are_collected)

    cut, above = lowest_rank(ID_BITS), rank_above(peak, ID_BITS)  # tokens that rank below ``cut`` are banned
    if top_k > 0:
        cut = search(cut, above, top_k, peak, source, False, ID_BITS)
    if top_p < 1.0:
        if top_k > 0:
            units = tl.zeros([TILE], tl.int64)
            for start in range(0, length, TILE):
                candidate_ranks = load_ranks(start, source, ID_BITS)
                units += tl.where(candidate_ranks >= cut, mass_of(candidate_ranks, peak, ID_BITS), 0)
            mass = (tl.sum(units).to(tl.float64) / UNITS).to(tl.float32)
        # Float32 as in truncation.py: the mass of equal tokens may be exactly top_p, so rounding must agree.
        likeliest = tl.div_rn(1.0, tl.maximum(mass, 1.0))
        enough = tl.ceil(top_p / likeliest.to(tl.float64) * UNITS).to(tl.int64)
        cut = search(cut, above, enough, peak, source, True, ID_BITS)
    if distance > -_INFINITY:
        cut = tl.maximum(cut, rank_of(peak + distance, (1 << ID_BITS) - 1, ID_BITS))

    key, position = tl.load(integers + row), tl.load(integers + num_rows + row)
    is_noisy = tl.load(integers + 3 * num_rows + row) != 0
    previous = tl.full((), _HIGHEST, tl.int64)
    for place in range(ranks):
        best = tl.full((), LOWEST_RANK, tl.int64)
        for start in range(0, length, TILE):
            candidate = load_ranks(start, source, ID_BITS)
            if is_cut:
                tokens, values = token_of(candidate, ID_BITS), value_of(candidate, ID_BITS)
                if is_noisy:
                    values += gumbel_at(key, position, tokens)
                values = tl.where(candidate >= cut, tl.maximum(values, _SMALLEST), _SMALLEST)
                candidate = tl.where(candidate > LOWEST_RANK, rank_of(values, tokens, ID_BITS), LOWEST_RANK)
            best = tl.maximum(best, tl.max(tl.where(candidate < previous, candidate, LOWEST_RANK)))
        value = value_of(best, ID_BITS)
        tl.store(top_tokens + row * ranks + place, token_of(best, ID_BITS))
        tl.store(perturbed + row * ranks + place, tl.where(value > _SMALLEST, value, -_INFINITY))
        previous = best


@triton.jit
def _load_statistics(statistics, row, num_rows, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """Returns a row's largest logit, the mass of all tokens relative to it, and whether the row is valid."""
    chunks = tl.arange(0, CHUNKS_PADDED)
    at, inside = statistics + row * CHUNKS + chunks, chunks < CHUNKS
    peaks = tl.load(at, mask=inside, other=-_INFINITY)
    masses = tl.load(at + num_rows * CHUNKS, mask=inside, other=0.0)
    faults = tl.load(at + 2 * num_rows * CHUNKS, mask=inside, other=0.0)
    peak = tl.maximum(tl.max(peaks), _SMALLEST)
    is_valid = (tl.max(peaks) > -_INFINITY) & (tl.max(faults) == 0.0)
    return peak, tl.sum(masses * tl.exp(peaks - peak)), is_valid


@triton.jit
def load_settings(integers, numbers, num_rows, row):
    """Returns top_k, temperature, top_p, and log(min_p): the cutoff relative to the largest logit."""
    top_k = tl.load(integers + 2 * num_rows + row)
    temperature = tl.load(numbers + row).to(tl.float32)
    top_p = tl.load(numbers + num_rows + row)
    return top_k, temperature, top_p, tl.load(numbers + 2 * num_rows + row).to(tl.float32)


@triton.jit
def is_truncated(top_k, top_p, distance):
    return (top_k > 0) | (top_p < 1.0) | (distance > -_INFINITY)
