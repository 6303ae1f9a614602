"""Operations of a Llama-family decoder layer between its matrix products, on a CPU."""

from dataclasses import replace

import torch
from torch import Tensor, get_num_threads

from outrider.engine.cache.narrow import NARROW
from outrider.engine.forward.attention import Paged, store
from outrider.engine.forward.layer_operations import Heads, Norm, PlainOperations
from outrider.engine.kernels.cpu.functions import functions


class CpuOperations(PlainOperations):
    """Implements the operations by compiled functions if these support them, else in torch."""

    def __init__(self) -> None:
        self._functions = functions()

    def normed(self, rows: Tensor, norm: Norm) -> Tensor:
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        self._norm(rows, norm, 1, result)
        return result

    def _norm(self, rows: Tensor, norm: Norm, groups: int, result: Tensor) -> None:
        self._functions.norm(
            rows.data_ptr(),
            rows.shape[0],
            groups,
            norm.size,
            rows.stride(0),
            norm.weight.data_ptr(),
            norm.epsilon,
            result.data_ptr(),
            result.stride(0),
            get_num_threads(),
        )

    def rotated_and_stored(
        self, product: Tensor, heads: Heads, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> Tensor:
        for part, norm in heads.normed_parts(product):
            self._norm(part, norm, part.shape[1], part)
        if rotation[0].shape[-1] < heads.dim:
            return super().rotated_and_stored(product, replace(heads, norms=()), rotation, paged)
        tokens = product.shape[0]
        query = product.new_empty(tokens, heads.queries, heads.dim)
        slots, cosines, sines = paged.slots_of(heads.layer), *rotation
        keys, values = paged.cache.keys[heads.layer], paged.cache.values[heads.layer]
        if is_narrow := keys.dtype == NARROW:
            slots = slice(0, tokens)
            keys, values = product.new_empty(2, tokens, heads.kv, heads.dim)
        self._functions.rotate_and_store(
            product.data_ptr(),
            tokens,
            heads.queries,
            heads.kv,
            heads.dim,
            cosines.data_ptr(),
            sines.data_ptr(),
            None if isinstance(slots, slice) else slots.data_ptr(),
            slots.start if isinstance(slots, slice) else 0,
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            get_num_threads(),
        )
        if is_narrow:
            store(paged, heads.layer, keys, values)
        return query

    def gated(self, gate_up: Tensor) -> Tensor:
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty(num_tokens, size)
        self._functions.gate(gate_up.data_ptr(), num_tokens, size, result.data_ptr(), get_num_threads())
        return result
