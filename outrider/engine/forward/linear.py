"""Linear layers with stored weights, or with weights packed for a CPU; joint products of a shared input.

`nn.Linear` multiplies by an unpacked weight. In float32 four rows then take twice as long as a single row,
and the order of a sum depends on the number of rows. With a weight packed at load, five rows take little
longer than a single row. A row's result then has the same bits alone and beside other rows.

The result equals that of `nn.Linear` up to rounding in float32, and exactly in bfloat16.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.kernels.cpu.product import PanelProduct
from outrider.engine.kernels.stored_weight import LEAST_SPAN, StoredWeight, joined_weight
from outrider.engine.models.registry import joined_products

logger = logging.getLogger(__name__)

EXPECTED_ROWS = 32  # rows for which oneDNN chooses its packed layout; it serves any number of rows
SLOW_ROWS, FILLED_ROWS = 2, 4  # up to 2 rows are padded to 4 for oneDNN


class OneDnnProduct:
    """Matrix product with a weight that oneDNN has packed.

    On slow memory, oneDNN's kernels for one or two rows reach less bandwidth than its kernels for more rows.
    So rows of zeros are added.
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
        """Returns the product of rows [num_rows, in_features], plus ``added``: [num_rows, out_features]."""
        num_rows = len(rows)
        if 0 < num_rows <= SLOW_ROWS:
            zeros = (0, 0, 0, FILLED_ROWS - num_rows)
            return self._product(pad(rows, zeros), None if added is None else pad(added, zeros))[:num_rows]
        return self._product(rows, added)

    def _product(self, rows: Tensor, added: Tensor | None) -> Tensor:
        if added is None:
            return self._pointwise(rows, self.packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return self._pointwise.binary(rows, added, self.packed, self._bias, "add")  # type: ignore[no-any-return]


# Largest relative error of a test product: far above rounding, far below the error of a wrong sum.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
TRIED_ROWS = (1, 5)  # rows of a test product with padding, and of another without
# Kernels compute outputs in blocks of 64 at most, so a test of more than 16 blocks shows nothing new.
BLOCK_OUTPUTS, TRIED_BLOCKS = 64, 16

PRODUCTS: dict[torch.dtype, type[PanelProduct | OneDnnProduct]] = {  # in float16 nn.Linear is faster
    torch.float32: PanelProduct,
    torch.bfloat16: OneDnnProduct,
}


class AddingLinear(nn.Module):
    """`nn.Linear` for inference that can add a tensor to its product."""

    out_features: int
    in_features: int
    multiply: Callable[..., Tensor]  # takes rows [num_rows, in_features], and optionally ``added``

    def forward(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns the product of rows [..., in_features], plus ``added``: [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        product = self.multiply(flat, None if added is None else added.reshape(-1, self.out_features))
        return product.view(*rows.shape[:-1], self.out_features)


class StoredLinear(AddingLinear):
    """Linear layer whose weight stays quantized, as its checkpoint stores it.

    On a GPU with Triton a kernel dequantizes codes in registers. Otherwise each product dequantizes the whole
    weight.
    """

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        """bias: [out_features]"""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.multiply = self.multiply_widened
        if weight.codes.device.type == "cuda" and weight.span >= LEAST_SPAN and find_spec("triton"):
            self.multiply = self._multiply_fused

    def multiply_widened(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """Dequantizes the weight, multiplies and adds in float32, and rounds the result once."""
        weight, wide = self.weight.widened(), rows.float()
        bias = None if self.bias is None else self.bias.float()
        if rows.device.type == "cpu" and compiled() is not None:
            product = PanelProduct(weight, bias)(wide, None if added is None else added.float())
        else:
            product = linear(wide, weight, bias)
            product = product if added is None else product + added
        return product.to(rows.dtype)

    def _multiply_fused(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        from outrider.engine.kernels.stored_product import multiply

        return multiply(rows, self.weight, self.bias, added)


class PackedLinear(AddingLinear):
    """`nn.Linear` for inference on a CPU, which keeps only a packed copy of its weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: [out_features, in_features], float32 or bfloat16
            bias: [out_features], same dtype

        Raises:
            RuntimeError: this machine cannot compute packed products; see why_unpacked.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        bias = None if bias is None else bias.detach()
        self.multiply = PRODUCTS[weight.dtype](weight.detach(), bias)


def function_of(product: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the layer as a function of rows [num_rows, in_features], without hooks if possible."""
    return product.multiply if isinstance(product, AddingLinear) else product


def adding(product: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that adds the product of rows to states, in place if possible.

    The function takes states [num_rows, out_features] and rows [num_rows, in_features].
    """
    if isinstance(product, AddingLinear):
        multiply = product.multiply
        return lambda states, rows: multiply(rows, states)
    if type(product) is nn.Linear and product.bias is None:
        weight = product.weight.t()
        return lambda states, rows: states.addmm_(rows, weight)
    return lambda states, rows: product(rows).add_(states)


Product = Callable[[Tensor, Tensor | None], nn.Module]  # takes weight and bias, as PackedLinear does


class SharedProduct(nn.Module):
    """Projections of a shared input as a single matrix product, computed when the first of them is called.

    Inputs are shared if they are the same tensor object. Projections of different inputs are correct too, but
    each computes the whole product.
    """

    def __init__(
        self, projections: Sequence[nn.Linear | StoredLinear], product: Product = PackedLinear
    ) -> None:
        """product: makes the layer of the joined weight, unless weights are stored quantized."""
        super().__init__()
        biases = [projection.bias for projection in projections if projection.bias is not None]
        bias = torch.cat(biases) if biases else None
        stored = [layer.weight for layer in projections if isinstance(layer, StoredLinear)]
        plain = [layer.weight.detach() for layer in projections if isinstance(layer, nn.Linear)]
        self.product = (
            StoredLinear(joined_weight(stored), bias) if stored else product(torch.cat(plain), bias)
        )
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
    """Part of a SharedProduct that replaces an nn.Linear."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, rows: Tensor) -> Tensor:
        return self.shared.part(self.index, rows)


def optimize_for_cpu(model: PreTrainedModel) -> None:
    """Replaces the linear layers that are faster packed, in place; the model is for inference from then on.

    If the output projection is tied to the input embedding, the embedding keeps its weight. Layers that this
    machine cannot pack stay as they are, and each reason is logged once.
    """
    join_projections(model, StoredLinear)
    reasons: set[str] = set()
    same_input = joined_products(model)
    # The list holds no linear layers, so that each weight is freed as soon as it is packed.
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


def join_projections(model: PreTrainedModel, *kinds: type[nn.Module]) -> None:
    """Joins linear layers of a shared input into a single product, in place, without packing weights.

    kinds: classes of these layers
    """
    same_input = joined_products(model)
    for module in [module for module in model.modules() if type(module) not in kinds]:
        for names in linear_groups(module, same_input, kinds):
            if len(names) > 1:
                replace(module, names, [getattr(module, name) for name in names], joined)


def joined(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    layer = nn.Linear(in_features, out_features, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def linear_groups(
    module: nn.Module, same_input: Iterable[tuple[str, ...]], kinds: Sequence[type[nn.Module]] = (nn.Linear,)
) -> Iterator[tuple[str, ...]]:
    """Yields the names of the linear layers directly in a module, grouped if they can share a product.

    Args:
        same_input: groups of names of layers that get the same input.
        kinds: classes of the layers.
    """
    alone: dict[str, Any] = {
        name: child
        for name, child in module.named_children()
        if type(child) in kinds and "forward" not in vars(child)  # else transformers has replaced ``forward``
    }
    for names in same_input:
        if alone.keys() >= set(names) and len({_layout(alone[name]) for name in names}) == 1:
            yield names
            alone = {name: layer for name, layer in alone.items() if name not in names}
    for name in alone:
        yield (name,)


def _layout(layer: Any) -> tuple[object, ...]:
    """Returns a description that is equal for layers that can share a product."""
    weight = layer.weight
    form = weight.layout if isinstance(weight, StoredWeight) else (layer.in_features, weight.dtype)
    return *form, layer.bias is None


def replace(
    module: nn.Module,
    names: tuple[str, ...],
    projections: Sequence[nn.Linear],
    product: Product = PackedLinear,
) -> None:
    """Replaces a linear layer by ``product``, or several linear layers by a shared product."""
    if len(names) == 1:
        setattr(module, names[0], product(projections[0].weight, projections[0].bias))
        return
    shared = SharedProduct(projections, product)
    for index, name in enumerate(names):
        setattr(module, name, Projection(shared, index))


@cache
def why_unpacked(dtype: torch.dtype, outputs: int, inputs: int) -> str | None:
    """Returns why a weight of this type and size is not packed; None if it is packed.

    Tests a product of that size once, as neither a processor's name nor a library's build says what works.
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
    except (AttributeError, RuntimeError) as error:  # oneDNN's operators in torch are not a public API
        return str(error)
    if all(error <= NEAR[dtype] * expected.norm() for error in errors):
        return None
    return f"a packed product of {outputs} outputs by {inputs} inputs is wrong on this processor"


def tried_outputs(outputs: int) -> int:
    """Returns the outputs of a smaller product that uses the same kernels: the rest after blocks is equal."""
    most = TRIED_BLOCKS * BLOCK_OUTPUTS
    return outputs if outputs <= most else most + outputs % BLOCK_OUTPUTS
