"""Attention that reads the cache where it lies."""

import ctypes

from torch import Tensor, get_num_threads

from outrider.engine.inputs.paged_input import TILE_FIELDS, PagedInput
from outrider.engine.kernels.cpu.functions import functions

WIDEST_VECTOR = 16  # numbers: what the dimensions of heads have to be a multiple of


class _Attention(ctypes.Structure):
    """Arguments in the order of functions.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "sinks", "block_table")),
        ("tiles", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("seen", "ancestors", "positions", "output")),
        *((name, ctypes.c_int64) for name in ("head_stride", "row_stride")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "blocks")),
        ("num_tiles", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("tile_fields", "words", "window")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class CpuAttention:
    """See outrider.engine.forward.kernel.Kernel, which this is. Padded layouts it does not take."""

    is_asynchronous = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._functions = functions()

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
    ) -> Tensor:
        (heads, rows, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
        output = query.new_empty(rows, heads, value_dim)
        tiles = paged.few_tiles, paged.many_tiles
        given = _Attention(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            paged.block_table.data_ptr(),
            tuple(of_kind.data_ptr() for of_kind in tiles),
            paged.seen.data_ptr(),
            paged.ancestors.data_ptr(),
            paged.position_ids.data_ptr(),
            output.data_ptr(),
            *query.stride()[:2],
            rows,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            self._block_size,
            paged.block_table.shape[1],
            tuple(of_kind.shape[0] for of_kind in tiles),
            TILE_FIELDS,
            paged.ancestors.shape[1],
            window or 0,
            key_dim**-0.5 if scaling is None else scaling,
            softcap or 0.0,
        )
        self._functions.attend(ctypes.byref(given), get_num_threads())
        return output
