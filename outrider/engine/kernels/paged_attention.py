"""Attention over the paged cache by Triton kernels: decoding, verifying chains and trees, and prompts."""

import math
from dataclasses import dataclass

import torch
import triton

from outrider.engine.cache.narrow import codes_of
from outrider.engine.inputs.context_parts import parts_of
from outrider.engine.inputs.paged_input import (
    FEW_TILE,
    LINES_OF_LATENTS,
    MANY_TILE,
    TILE_FIELDS,
    PagedInput,
    split_tiles_of,
)
from outrider.engine.kernels.attend_tile import STAGES, attend_tile
from outrider.engine.kernels.block_tables import NEW_BLOCKS_AT_ONCE, take_in_blocks
from outrider.engine.kernels.joined_parts import join_parts

LEAST_LINES = 16  # lines of a matrix product, at least, as tl.dot requires


@dataclass(frozen=True)
class Tiling:
    """Size of a program's work on a tile."""

    rows: int  # rows of a tile
    lines: int  # rows times query heads that are computed together, at most
    slots: int  # slots that are read at a time, at most; divides the length of the shortest part
    warps: int
    share: float = 0.6  # share of a multiprocessor's memory for prefetched keys and values


# With few rows, 64 lines or 64 slots would need more registers than a thread has.
FEW = Tiling(FEW_TILE, lines=32, slots=32, warps=4)
MANY = Tiling(MANY_TILE, lines=128, slots=128, warps=8)
# Sums over latents take most registers of a multiprocessor, so that a program has it for itself.
FEW_OF_LATENTS = Tiling(FEW_TILE, lines=LINES_OF_LATENTS, slots=32, warps=8, share=0.75)
MANY_OF_LATENTS = Tiling(MANY_TILE, lines=2 * LINES_OF_LATENTS, slots=32, warps=8, share=0.75)
# In float32 the queries of as many lines as in 16 bit would exceed the 99 KB of an sm_89.
MANY_OF_WIDE_LATENTS = Tiling(MANY_TILE, lines=LINES_OF_LATENTS, slots=32, warps=8, share=0.75)
# Slots at a time, at most, with a window or a narrow cache, whose masks or codes also take registers.
FEWER_SLOTS = 64
# Registers of a thread: the maximum. Without it ptxas spills some, to run more programs than are launched.
MOST_REGISTERS = 255


@dataclass(frozen=True)
class PagedAttention:
    """Attention kernels of an engine. Implements outrider.engine.forward.kernel.Kernel."""

    block_size: int  # slots
    third_length: int  # slots of a context's parts of the third length
    shared_memory: int  # bytes that a program may use on a multiprocessor
    programs: int  # programs that share the tiles of few queries
    is_asynchronous: bool = True

    def take_in(self, paged: PagedInput[torch.Tensor]) -> None:
        take_in_blocks[(1,)](paged.block_tables, paged.new_blocks, paged.work, AT_ONCE=NEW_BLOCKS_AT_ONCE)

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
        windowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, rows, key_dim = query.shape
        kv_heads, value_dim = values.shape[1:]
        repeats = heads // kv_heads
        output = query.new_empty(rows, heads, value_dim)
        rotated = 0 if values.is_contiguous() else key_dim - value_dim
        splits = parts_of(paged.block_tables.shape[1] * self.block_size, self.third_length)
        most_split = split_tiles_of(heads, caches_latents=rotated > 0)
        split_tiles = min(len(paged.few_tiles), most_split)
        held = (split_tiles * FEW_TILE, heads, splits)
        parts = query.new_empty(*held, value_dim, dtype=torch.float32)
        weights = query.new_empty(*held, 2, dtype=torch.float32)
        key_width, value_width, rotated_width = (
            max(LEAST_LINES, triton.next_power_of_2(dim)) for dim in (key_dim - rotated, value_dim, rotated)
        )
        read = key_width + (rotated_width if rotated else value_width)  # numbers of a slot
        scale = key_dim**-0.5 if scaling is None else scaling
        of_many, of_few = MANY, FEW
        if rotated:
            of_many = MANY_OF_LATENTS if query.element_size() == 2 else MANY_OF_WIDE_LATENTS
            of_few = FEW_OF_LATENTS
        many, few = (paged.many_tiles, of_many, 0), (paged.few_tiles, of_few, self.third_length)
        for tiles, tiling, third in (many, few):
            if not len(tiles):
                continue
            group = repeats if rotated else math.gcd(repeats, tiling.lines // tiling.rows)
            lines = max(LEAST_LINES, min(tiling.lines, group * tiling.rows))
            cuts = -(-group * tiling.rows // lines)
            most = cuts * (len(tiles) + split_tiles * (splits - 1) if third else len(tiles))
            programs = min(most, -(-self.programs * group // heads)) if third else most
            attend_tile[(programs, heads // group)](
                query,
                codes_of(keys),
                codes_of(values),
                paged.block_tables,
                windowed,
                tiles,
                paged.work,
                paged.seen,
                paged.ancestors,
                paged.paths,
                paged.position_ids,
                sinks,
                output,
                parts,
                weights,
                rows,
                query.stride(0),
                query.stride(1),
                paged.block_tables.shape[1],
                paged.ancestors.shape[1],
                paged.paths.shape[1],
                splits,
                scale,
                softcap,
                window,
                KV_HEADS=kv_heads,
                REPEATS=repeats,
                GROUP=group,
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                ROTATED=rotated,
                KEY_WIDTH=key_width,
                VALUE_WIDTH=value_width,
                ROTATED_WIDTH=rotated_width,
                BLOCK=self.block_size,
                FIELDS=TILE_FIELDS,
                M=lines,
                CUTS=cuts,
                SPLIT=most_split,
                N=min(
                    tiling.slots,
                    tiling.slots if window is None and keys.dtype == query.dtype else FEWER_SLOTS,
                    self._slots(read * query.element_size(), tiling.share),
                ),
                TILE=tiling.rows,
                THIRD=third,
                WINDOW=window is not None,
                WINDOWED=windowed is not None,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                CHAINS=paged.paths.shape[1] > 0,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
                num_warps=tiling.warps,
                num_stages=STAGES,
                maxnreg=MOST_REGISTERS,
                enable_fp_fusion=False,
            )
        if split_tiles:
            join_parts[(split_tiles, heads)](
                parts,
                weights,
                paged.few_tiles,
                paged.work,
                sinks,
                output,
                splits,
                scale,
                HEADS=heads,
                VALUE_DIM=value_dim,
                VALUE_WIDTH=value_width,
                FIELDS=TILE_FIELDS,
                TILE=FEW_TILE,
                THIRD=self.third_length,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                num_warps=4,
                enable_fp_fusion=False,
            )
        return output

    def _slots(self, size: int, share: float) -> int:
        """Returns the number of slots of ``size`` bytes that are read at a time: a power of two."""
        most = int(share * self.shared_memory / STAGES / size)
        return max(LEAST_LINES, 1 << (most.bit_length() - 1))
