"""Linear layer with LoRA adapters that are chosen per row: ``W x + B (A x)``.

Each adapter is applied to its own rows alone, so a row without an adapter keeps its bits. On a CPU the
weights of adapters are packed as the weights of layers are. On a GPU with Triton a kernel finds them by their
addresses in a table, so that CUDA graphs compute any adapter. So the bits of a row do not depend on the
adapters of other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from outrider.engine.adapters.checkpoint import LowRank
from outrider.engine.forward.batch import AdapterRows, AdapterTiles
from outrider.engine.forward.linear import (
    AddingLinear,
    PackedLinear,
    adding,
    function_of,
    joined,
    why_unpacked,
)


@dataclass
class PassUnderWay:
    """Rows of the pass under way that have adapters. All adapted layers of a model share it."""

    rows: AdapterRows = ()


@dataclass(frozen=True)
class KernelRoom:
    """Room for adapters that a GPU kernel computes."""

    adapters: int  # adapters at a time, which have the numbers from 1 on
    rank: int  # highest rank of an adapter


@dataclass(frozen=True)
class _Products:
    shrink: Callable[[Tensor], Tensor]  # [num_rows, in_features] to [num_rows, rank]
    expand: Callable[[Tensor], Tensor]  # [num_rows, rank] to [num_rows, out_features]


class AdaptedLinear(AddingLinear):
    """Linear layer, or several joined projections, with the low-rank changes of adapters by number."""

    def __init__(
        self, layer: nn.Module, widths: Sequence[int], under_way: PassUnderWay, room: KernelRoom | None
    ) -> None:
        """
        Args:
            layer: linear layer, whole or a rank's share.
            widths: output features of each joined projection; a single width for a single layer.
            room: room for adapters of the kernel; None: no kernel computes them.
        """
        super().__init__()
        self.layer = layer
        self.out_features, self.in_features = sum(widths), int(layer.in_features)  # type: ignore[arg-type]
        self._offsets = [0, *accumulate(widths)]
        self._under_way = under_way
        self._product, self._added = function_of(layer), adding(layer)
        self.changes = nn.ModuleDict()
        self._products: dict[int, _Products] = {}
        self._room = room
        self._table: Tensor | None = None  # argument of add_low_rank; None: no adapter changes this layer
        self.multiply = self._multiply

    def _multiply(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        product = self._product(rows) if added is None else self._added(added, rows)
        under_way = self._under_way.rows
        if isinstance(under_way, AdapterTiles):
            self._add_by_kernel(rows, under_way, product)
            return product
        for adapter, places in under_way:
            if (own := self._products.get(adapter)) is None:
                continue
            if places is None:
                product += own.expand(own.shrink(rows))
            else:
                product.index_add_(0, places, own.expand(own.shrink(rows[places])))
        return product

    def _add_by_kernel(self, rows: Tensor, tiles: AdapterTiles, product: Tensor) -> None:
        from outrider.engine.kernels.low_rank import add_low_rank

        if self._table is not None:
            assert self._room is not None
            most_ranks = self._room.rank * (len(self._offsets) - 1)
            add_low_rank(rows, self._table, tiles.rows, tiles.tiles, most_ranks, product)

    def make_table(self, device: torch.device) -> Tensor:
        """Makes the table of the kernel unless it is there, since graphs keep its address; returns it."""
        if self._table is None:
            assert self._room is not None
            self._table = torch.zeros(1 + self._room.adapters, 3, dtype=torch.int64, device=device)
        return self._table

    def take(
        self, adapter: int, changes: dict[int, LowRank], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Adds an adapter's changes, which are joined as the projections are.

        Args:
            changes: changes by number of the projection, for the whole layer or a rank's share.
            dtype: type of the model.
        """
        rank = sum(len(change.shrink) for change in changes.values())
        expand, first = torch.zeros(self.out_features, rank), 0
        for projection, change in changes.items():
            stop = first + len(change.shrink)
            expand[self._offsets[projection] : self._offsets[projection + 1], first:stop] = change.expand
            first = stop
        shrink = torch.cat([change.shrink for change in changes.values()])
        if self._room is None:
            layers = [_layer_of(weight.to(device, dtype).contiguous()) for weight in (shrink, expand)]
            self.changes[str(adapter)] = nn.ModuleList(layers)
            self._products[adapter] = _Products(*map(function_of, layers))
            return
        weights = [weight.to(device, dtype).contiguous() for weight in (shrink, expand.t())]
        held = [nn.Parameter(weight, requires_grad=False) for weight in weights]
        self.changes[str(adapter)] = nn.ParameterList(held)
        places = [*(weight.data_ptr() for weight in weights), rank]
        self.make_table(device)[adapter] = torch.tensor(places)

    def drop(self, adapter: int) -> None:
        """Frees an adapter's changes, if it has any here."""
        if str(adapter) in self.changes:
            del self.changes[str(adapter)]
            self._products.pop(adapter, None)
            if self._table is not None:
                self._table[adapter] = 0


def _layer_of(weight: Tensor) -> nn.Module:
    """Returns the layer of a weight [out_features, in_features], packed if the model's layers are."""
    is_packed = weight.device.type == "cpu" and why_unpacked(weight.dtype, *weight.shape) is None
    return PackedLinear(weight, None) if is_packed else joined(weight, None)
