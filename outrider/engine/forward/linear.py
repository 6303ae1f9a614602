"""Linear layers on a CPU: weights packed once for oneDNN, projections of one input computed as one product.

`nn.Linear` multiplies from the weight as it lies, which in float32 makes four rows cost twice as much as one.
oneDNN multiplies from a weight packed at load, which costs no more for five rows than for one. Its kernels
for one row and for two read memory more slowly, so rows of zeros are added there.

In float32 a row's result is within rounding of `nn.Linear`'s. Where it was measured (AVX-512) it is the same
alone and beside others, bit for bit. In bfloat16 it is always what `nn.Linear` computes.
"""

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Below, nn.Linear is faster; float16 is not here because its kernel for one row is always faster.
SMALLEST_PACKED_BYTES = {torch.float32: 2**20, torch.bfloat16: 0}
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXPECTED_ROWS = 32  # what the packed layout is chosen for; it serves any number
SLOW_ROWS, FILLED_ROWS = 2, 4  # so few rows are filled up to so many


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU from a packed weight; keeps no other copy of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: [out_features, in_features], float32 or bfloat16
            bias: [out_features], same dtype
        """
        super().__init__()
        weight = weight.detach().contiguous()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        self._pointwise = torch.ops.mkldnn._linear_pointwise

    def forward(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., in_features] to [..., out_features]; ``added`` is of the result's shape."""
        num_rows = rows.numel() // self.in_features
        if 0 < num_rows <= SLOW_ROWS:
            zeros = (0, 0, 0, FILLED_ROWS - num_rows)
            given = None if added is None else pad(added.reshape(num_rows, -1), zeros)
            product = self._product(pad(rows.reshape(num_rows, -1), zeros), given)
            return product[:num_rows].view(*rows.shape[:-1], self.out_features)
        return self._product(rows, added)

    def _product(self, rows: Tensor, added: Tensor | None) -> Tensor:
        if added is None:
            return self._pointwise(rows, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return self._pointwise.binary(rows, added, self.packed, self.bias, "add")  # type: ignore[no-any-return]


Product = Callable[[Tensor, Tensor | None], nn.Module]  # from weight and bias, as PackedLinear


class SharedProduct(nn.Module):
    """Projections of one input as one matrix product, computed when the first of them is asked for.

    "The same input" is the same tensor object: projections of different ones are right too, at the price of
    computing the whole product for each.
    """

    def __init__(self, projections: list[nn.Linear], product: Product = PackedLinear) -> None:
        super().__init__()
        biases = [projection.bias for projection in projections if projection.bias is not None]
        weight = torch.cat([projection.weight.detach() for projection in projections])
        self.product = product(weight, torch.cat([*biases]) if biases else None)
        self.widths = [projection.out_features for projection in projections]
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def part(self, index: int, rows: Tensor) -> Tensor:
        if rows is not self.input or index not in self.parts:
            self.input = rows
            self.parts = dict(enumerate(self.product(rows).split(self.widths, dim=-1)))
        part = self.parts.pop(index)
        if not self.parts:
            self.input = None
        return part


class Projection(nn.Module):
    """One part of a SharedProduct, in the place of the nn.Linear it was."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, rows: Tensor) -> Tensor:
        return self.shared.part(self.index, rows)


def optimize_for_cpu(model: PreTrainedModel) -> None:
    """Replaces the linear layers that are faster packed, in place; the model is for inference from then on.

    An output projection tied to the input embedding leaves the embedding where it is. Where this build of
    torch cannot pack, the layers stay as they are and the log says so once.
    """
    dtypes = {module.weight.dtype for module in model.modules() if type(module) is nn.Linear}
    packable = {dtype for dtype in dtypes & SMALLEST_PACKED_BYTES.keys() if packing_works(dtype)}
    if missing := dtypes & SMALLEST_PACKED_BYTES.keys() - packable:
        logger.warning("oneDNN cannot pack %s weights here; linear layers stay as they are", missing)
    # Without the layers themselves: each one's weight is to go as soon as it is packed.
    for module in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in linear_groups(module):
            projections: list[nn.Linear] = [getattr(module, name) for name in names]
            dtype = projections[0].weight.dtype
            size = sum(projection.weight.nbytes for projection in projections)
            if dtype in packable and size >= SMALLEST_PACKED_BYTES[dtype]:
                replace(module, names, projections)
            elif len(names) > 1:
                replace(module, names, projections, joined)


def join_projections(model: PreTrainedModel) -> None:
    """Computes linear layers of one input as one product, in place, from weights that stay as they are."""
    for module in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in linear_groups(module):
            if len(names) > 1:
                replace(module, names, [getattr(module, name) for name in names], joined)


def joined(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    layer = nn.Linear(in_features, out_features, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def linear_groups(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of the linear layers directly in a module, together where they can share one product."""
    alone = {
        name: child
        for name, child in module.named_children()
        if type(child) is nn.Linear and "forward" not in vars(child)  # else transformers changed what it does
    }
    for names in SAME_INPUT:
        if alone.keys() >= set(names):
            together = [alone[name] for name in names]
            if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in together}) == 1:
                yield names
                alone = {name: layer for name, layer in alone.items() if name not in names}
    for name in alone:
        yield (name,)


def replace(
    module: nn.Module,
    names: tuple[str, ...],
    projections: list[nn.Linear],
    product: Product = PackedLinear,
) -> None:
    """Puts ``product`` in the place of one linear layer, or a shared one in the place of several."""
    if len(names) == 1:
        setattr(module, names[0], product(projections[0].weight, projections[0].bias))
        return
    shared = SharedProduct(projections, product)
    for index, name in enumerate(names):
        setattr(module, name, Projection(shared, index))


def packing_works(dtype: torch.dtype) -> bool:
    """Whether torch has the operators, which are not public, and they compute what they should."""
    weight, rows = torch.eye(16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    try:
        return torch.equal(PackedLinear(weight, None)(rows), linear(rows, weight))
    except (AttributeError, RuntimeError):
        return False
