"""Linear layers on a CPU: weights packed once, projections of one input computed as one product.

`nn.Linear` multiplies from the weight as it lies, which in float32 makes four rows cost twice as much as one,
and adds up in an order that depends on the number of rows. From a weight packed at load five rows cost
little more than one, and a row's result is the same alone and beside others, bit for bit.

In float32 it is within rounding of `nn.Linear`'s, in bfloat16 exactly what `nn.Linear` computes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from outrider.engine.kernels.cpu.product import PanelProduct
from outrider.engine.models.registry import joined_products

logger = logging.getLogger(__name__)

EXPECTED_ROWS = 32  # what oneDNN's packed layout is chosen for; it serves any number
SLOW_ROWS, FILLED_ROWS = 2, 4  # so few rows are filled up to so many for oneDNN


class OneDnnProduct:
    """Products with one weight as oneDNN packs it. Where memory is slow its kernels for one row and for two
    read it more slowly than those for more, so rows of zeros are added there.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: [out_features, in_features]
            bias: [out_features], same dtype
        """
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), EXPECTED_ROWS)
        self._bias = bias
        self._pointwise = torch.ops.mkldnn._linear_pointwise

    def __call__(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """[num_rows, in_features] to [num_rows, out_features]; ``added`` is of the result's shape."""
        num_rows = len(rows)
        if 0 < num_rows <= SLOW_ROWS:
            zeros = (0, 0, 0, FILLED_ROWS - num_rows)
            return self._product(pad(rows, zeros), None if added is None else pad(added, zeros))[:num_rows]
        return self._product(rows, added)

    def _product(self, rows: Tensor, added: Tensor | None) -> Tensor:
        if added is None:
            return self._pointwise(rows, self.packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return self._pointwise.binary(rows, added, self.packed, self._bias, "add")  # type: ignore[no-any-return]


# Largest error of a product that is tried, by its length: far above rounding, far below a wrong sum.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
TRIED_ROWS = (1, 5)  # a row that is filled up, and rows that are not
# Kernels compute outputs by blocks of so many at most: more blocks than this show nothing new.
BLOCK_OUTPUTS, TRIED_BLOCKS = 64, 16

PRODUCTS: dict[torch.dtype, type[PanelProduct | OneDnnProduct]] = {  # not float16: there nn.Linear is faster
    torch.float32: PanelProduct,
    torch.bfloat16: OneDnnProduct,
}


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU from a packed weight; keeps no other copy of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: [out_features, in_features], float32 or bfloat16
            bias: [out_features], same dtype

        Raises:
            RuntimeError: this machine cannot: see why_unpacked.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        bias = None if bias is None else bias.detach()
        self.multiply = PRODUCTS[weight.dtype](weight.detach(), bias)

    def forward(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., in_features] to [..., out_features]; ``added`` is of the result's shape."""
        flat = rows.reshape(-1, self.in_features)
        product = self.multiply(flat, None if added is None else added.reshape(-1, self.out_features))
        return product.view(*rows.shape[:-1], self.out_features)


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

    An output projection tied to the input embedding leaves the embedding where it is. Layers that this
    machine cannot pack stay as they are, and the log says why, once for each reason.
    """
    reasons: set[str] = set()
    same_input = joined_products(model)
    # Without the layers themselves: each one's weight is to go as soon as it is packed.
    for module in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in linear_groups(module, same_input):
            projections: list[nn.Linear] = [getattr(module, name) for name in names]
            weight = projections[0].weight
            outputs = sum(projection.out_features for projection in projections)
            reason = why_unpacked(weight.dtype, outputs, weight.shape[1])
            if reason is None:
                replace(module, names, projections)
                continue
            if weight.dtype in PRODUCTS:
                reasons.add(f"{weight.dtype}: {reason}")
            if len(names) > 1:
                replace(module, names, projections, joined)
    for reason in sorted(reasons):
        logger.warning("linear layers stay as they are, which is slower: %s", reason)


def join_projections(model: PreTrainedModel) -> None:
    """Computes linear layers of one input as one product, in place, from weights that stay as they are."""
    same_input = joined_products(model)
    for module in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in linear_groups(module, same_input):
            if len(names) > 1:
                replace(module, names, [getattr(module, name) for name in names], joined)


def joined(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    layer = nn.Linear(in_features, out_features, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def linear_groups(module: nn.Module, same_input: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yields names of the linear layers directly in a module, together if they can share one product.

    same_input: names of layers that are given the same input.
    """
    alone = {
        name: child
        for name, child in module.named_children()
        if type(child) is nn.Linear and "forward" not in vars(child)  # else transformers changed what it does
    }
    for names in same_input:
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


@cache
def why_unpacked(dtype: torch.dtype, outputs: int, inputs: int) -> str | None:
    """Reason for which a weight of this type and size stays as it is; None if it is packed.

    Tries a product of that size once. What a processor can do follows neither from its name nor from what a
    library was built with.
    """
    if dtype not in PRODUCTS:
        return "nn.Linear is faster"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(tried_outputs(outputs), inputs, generator=generator).to(dtype)
    rows = torch.randn(max(TRIED_ROWS), inputs, generator=generator).to(dtype)
    expected = rows.float() @ weight.float().t()
    try:
        product = PRODUCTS[dtype](weight, None)
        errors = [(product(rows[:count]) - expected[:count]).norm() for count in TRIED_ROWS]
    except (AttributeError, RuntimeError) as error:  # oneDNN's operators are not public
        return str(error)
    if all(error <= NEAR[dtype] * expected.norm() for error in errors):
        return None
    return f"a packed product of {outputs} outputs by {inputs} inputs is wrong on this processor"


def tried_outputs(outputs: int) -> int:
    """Outputs of a smaller product that the same kernels compute, with as many left over by their blocks."""
    most = TRIED_BLOCKS * BLOCK_OUTPUTS
    return outputs if outputs <= most else most + outputs % BLOCK_OUTPUTS
