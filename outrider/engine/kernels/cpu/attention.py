"""Attention on a CPU that reads the paged cache in place."""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor, get_num_threads

from outrider.decoding.draft import MAX_NODES
from outrider.engine.cache.narrow import widened
from outrider.engine.inputs.paged_input import END, LANE, PagedInput
from outrider.engine.kernels.cpu.functions import functions

WIDEST_VECTOR = 16  # numbers of an AVX512 register; head dimensions have to be multiples of it
DTYPES = (torch.float32, torch.bfloat16)


class _Attention(ctypes.Structure):
    """Input of attend_float32 and attend_bfloat16: the fields of Attention in functions.cpp, in order."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "keys", "values", "sinks", "block_table", "windowed")
        ),
        ("tiles", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("seen", "ancestors", "paths", "positions", "output")),
        *((name, ctypes.c_int64) for name in ("head_stride", "row_stride")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "blocks")),
        ("num_tiles", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("words", "path_length", "window")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class CpuAttention:
    """Implements outrider.engine.forward.kernel.Kernel. Sums are float32, and the output of padding is 0.

    Keys and values are read in the query's type. Blocks of a narrow cache are converted first, and values
    that are a part of the keys are copied.
    """

    is_asynchronous = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        library = functions()
        self._attend = dict(zip(DTYPES, (library.attend_float32, library.attend_bfloat16), strict=True))

    def take_in(self, paged: PagedInput[Tensor]) -> None:
        pass  # on a CPU, host and device share the tables

    def __call__(
        self,
        paged: PagedInput[Tensor],
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        windowed: Tensor | None = None,
    ) -> Tensor:
        if keys.dtype != query.dtype or not values.is_contiguous():
            paged, keys, values = self._widened(paged, keys, values, query.dtype, windowed)
            windowed = None
        (heads, rows, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
        output = query.new_empty(rows, heads, value_dim)
        tiles = paged.few_tiles, paged.many_tiles
        sinks = None if sinks is None else sinks.float()
        given = _Attention(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            paged.block_tables.data_ptr(),
            None if windowed is None else windowed.data_ptr(),
            tuple(of_kind.data_ptr() for of_kind in tiles),
            paged.seen.data_ptr(),
            paged.ancestors.data_ptr(),
            paged.paths.data_ptr(),
            paged.position_ids.data_ptr(),
            output.data_ptr(),
            *query.stride()[:2],
            rows,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            self._block_size,
            paged.block_tables.shape[1],
            tuple(of_kind.shape[0] for of_kind in tiles),
            paged.ancestors.shape[1],
            paged.paths.shape[1],
            window or 0,
            key_dim**-0.5 if scaling is None else scaling,
            softcap or 0.0,
        )
        self._attend[query.dtype](ctypes.byref(given), get_num_threads())
        return output

    def _widened(
        self,
        paged: PagedInput[Tensor],
        keys: Tensor,
        values: Tensor,
        dtype: torch.dtype,
        windowed: Tensor | None,
    ) -> tuple[PagedInput[Tensor], Tensor, Tensor]:
        """Returns the input with renumbered blocks, and converted keys and values of the blocks it reads."""
        tiles = torch.cat([paged.few_tiles, paged.many_tiles])
        drafted = MAX_NODES if paged.paths.shape[1] else 0  # nodes off a chain are stored after its end
        ends = tiles.new_zeros(len(paged.block_tables))
        ends.scatter_reduce_(0, tiles[:, LANE], tiles[:, END] + drafted, "amax")
        held = paged.block_tables[:, : -(-int(ends.max()) // self._block_size)]
        are_read = torch.arange(held.shape[1]) * self._block_size < ends[:, None]
        blocks, numbers = held[are_read].unique(return_inverse=True)
        tables = held.new_zeros(held.shape)
        tables[are_read] = numbers
        blocks = blocks if windowed is None else windowed[blocks]
        read = [stored.unflatten(0, (-1, self._block_size))[blocks] for stored in (keys, values)]
        keys, values = (widened(stored, dtype).flatten(0, 1) for stored in read)
        return replace(paged, block_tables=tables), keys, values
