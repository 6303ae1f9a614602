"""Mixtures of experts: a token chooses some of a layer's experts, and only chosen experts are read.

A row's result does not depend on the other rows. Rows of an expert are multiplied together, by products that
have the same bits for any number of rows. The experts of a token are summed in the order of its choice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, relu

from outrider.engine.forward.layer_operations import LayerOperations, Routing
from outrider.engine.forward.linear import PackedLinear, function_of, joined, why_unpacked
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.kernels.cpu.product import PanelProduct
from outrider.engine.kernels.stored_weight import StoredWeight, joined_weight
from outrider.engine.models.architecture import Mixture
from outrider.engine.models.registry import mixtures_in
from outrider.engine.parallel.layers import local_share
from outrider.engine.parallel.sums import Sum

Clamped = tuple[float, float]  # slope of the gate's sigmoid, and clamp limit of gate and up
Weights = tuple[Tensor | StoredWeight, Tensor | None]  # [outputs, inputs], and a bias [outputs]


def weighed(product: Tensor, weights: Tensor) -> Tensor:
    """Returns the product of a shared expert, scaled by the sigmoid of its gate.

    A row has the same bits alone and beside other rows. torch.sigmoid is not used on a CPU, because it rounds
    the last numbers of a tensor differently if they do not fill a SIMD vector.

    Args:
        product: [num_rows, hidden_size]
        weights: [num_rows, 1] product of the gate
    """
    if product.device.type == "cpu":
        return product / (1 + torch.exp(-weights))
    return product * torch.sigmoid(weights)


class Experts(nn.Module):
    """Experts of a layer for inference, or a rank's share of each expert."""

    read: Tensor | None = None  # int32 [1] counter of the experts that are read; None: not counted

    def __init__(self, count: int, add: Sum | None) -> None:
        """
        Args:
            count: experts of the layer.
            add: sums over the ranks; None: experts are not divided among ranks.
        """
        super().__init__()
        self.count, self.add = count, add

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum over the ranks. transformers calls its experts with these arguments."""
        total = self.multiply(rows, chosen, weights)
        return total if self.add is None else self.add(total)

    def multiply(self, rows: Tensor, chosen: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns this rank's part of the weighted sum of each row's experts, plus ``added``.

        Args:
            rows: [num_rows, hidden_size].
            chosen, weights: chosen experts of each row, and their weights, [num_rows, slots] each.
            added: [num_rows, hidden_size].

        Returns:
            [num_rows, hidden_size] of the rows' dtype, added in float32 and rounded once
        """
        raise NotImplementedError


class SingleExperts(Experts):
    """Experts that are computed one after the other, as on a CPU."""

    def __init__(
        self,
        products: Sequence[tuple[nn.Module, nn.Module]],
        clamped: Clamped | None,
        operations: LayerOperations,
        add: Sum | None,
        least_rows: int,
    ) -> None:
        """
        Args:
            products: linear layers of each expert: gate, if it has any, and up as a single product, and down.
            clamped: parameters of gpt-oss's activation; None: the gate is silu.
            add: argument of Experts.
            least_rows: rows of a product are padded with zeros to a multiple of this; 1: no padding.
        """
        super().__init__(len(products), add)
        self.products: Any = nn.ModuleList(nn.ModuleList(pair) for pair in products)
        self._functions = [(function_of(first), function_of(second)) for first, second in products]
        self.clamped = clamped
        self._operations, self._least_rows = operations, least_rows

    def multiply(self, rows: Tensor, chosen: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
        (num_rows, slots), size = chosen.shape, rows.shape[1]
        pairs = chosen.flatten().argsort(stable=True)
        products, first, read = rows.new_empty(num_rows * slots, size), 0, 0
        for expert, count in enumerate(chosen.flatten().bincount().tolist()):
            if count:
                of_expert = pairs[first : first + count]
                products[of_expert] = self._product(expert, rows[of_expert // slots])
                first, read = first + count, read + 1
        if self.read is not None:
            self.read += read
        weighted = products.view(num_rows, slots, size).float() * weights[..., None]
        total = torch.zeros_like(weighted[:, 0]) if added is None else added.float()
        for of_slot in weighted.unbind(1):
            total = total + of_slot
        return total.to(rows.dtype)

    def _product(self, expert: int, rows: Tensor) -> Tensor:
        gate_up, down = self._functions[expert]
        filled = pad(rows, (0, 0, 0, -len(rows) % self._least_rows))
        return down(self._activated(gate_up(filled)))[: len(rows)]

    def _activated(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up, or with ``clamped`` numbers gate * sigmoid(slope * gate) * (up + 1)."""
        if self.clamped is not None:
            (slope, limit), (gate, up) = self.clamped, gate_up.chunk(2, -1)
            gate.clamp_(max=limit).mul_(slope)
            up.clamp_(-limit, limit).add_(1).div_(slope)
        return self._operations.gated(gate_up)


class SquaredExperts(SingleExperts):
    """Experts without a gate: the first product makes ups alone, and the activation is relu(up) squared."""

    def _activated(self, gate_up: Tensor) -> Tensor:
        return relu(gate_up).square()


class JoinedExperts(Experts):
    """Experts that are computed together by kernels of a GPU."""

    def __init__(self, gate_up: Weights, down: Weights, clamped: Clamped | None, add: Sum | None) -> None:
        """
        Args:
            gate_up: concatenated weights and biases of all experts, the gates of an expert before its ups.
            down: concatenated weights and biases of all experts.
            clamped, add: arguments of SingleExperts.
        """
        from outrider.engine.kernels.experts import multiply_chosen

        super().__init__(down[0].shape[0] // gate_up[0].shape[1], add)
        self.gate_up, self.gate_up_bias = gate_up
        self.down, self.down_bias = down
        self._clamped, self._multiply = clamped, multiply_chosen

    def multiply(self, rows: Tensor, chosen: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
        biases = self.gate_up_bias, self.down_bias
        return self._multiply(
            rows, chosen, weights.float(), self.gate_up, self.down, biases, self._clamped, added, self.read
        )


class ExpertRouter:
    """Router of a layer: chooses the experts of each row."""

    def __init__(self, mixture: Mixture, mlp: nn.Module, operations: LayerOperations) -> None:
        """mlp: transformers' module that contains the modules of the mixture."""
        router: Any = mlp.get_submodule(mixture.router)
        correction, groups = mixture.correction, mixture.groups
        is_normalized = mixture.normalized
        self._routing = Routing(
            mixture.scores,
            router.top_k,
            None if correction is None else _tensor_at(mlp, correction).float(),
            None if groups is None else (getattr(router, groups[0]), getattr(router, groups[1])),
            is_normalized if isinstance(is_normalized, bool) else getattr(router, is_normalized),
            1.0 if mixture.scaling is None else getattr(router, mixture.scaling),
        )
        self._operations = operations
        bias: Tensor | None = getattr(router, "bias", None)
        self._weight = router.weight.detach().float()
        self._bias = None if bias is None else bias.detach().float()
        is_packed = self._weight.device.type == "cpu" and compiled() is not None
        self._product = PanelProduct(self._weight, self._bias) if is_packed else self._multiplied

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the result of LayerOperations.routed for rows [num_rows, hidden_size]."""
        return self._operations.routed(self._product(rows.float()), self._routing)

    def _multiplied(self, rows: Tensor) -> Tensor:
        return linear(rows, self._weight, self._bias)


def _tensor_at(module: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found: Tensor = getattr(module.get_submodule(owner), name)
    return found


def replace_experts(
    model: Any, operations: LayerOperations, add: Sum | None, least_rows: int, *, are_joined: bool
) -> bool:
    """Replaces the experts of a model's described mixtures, in place; returns False if some have to stay.

    Args:
        operations, add, least_rows: arguments of SingleExperts.
        are_joined: whether kernels of a GPU compute the experts.
    """
    for _, mlp, mixture in mixtures_in(model):
        experts: Any = getattr(mlp, mixture.experts)
        made: Experts | None
        if are_joined:
            made = _joined(experts, mixture, add)
        else:
            clamped = clamped_of(experts, mixture)
            made = SingleExperts(products_of(experts), clamped, operations, add, least_rows)
        if made is None:
            return False
        mlp.set_submodule(mixture.experts, made)
    return True


def count_read(model: nn.Module, device: torch.device) -> tuple[Tensor, int] | None:
    """Makes the experts of a model count how many of them its passes read.

    Returns:
        The counter, int32 [1], which the caller resets to 0, and the number of experts in all layers; None:
        the model has no experts that count.
    """
    every = [module for module in model.modules() if isinstance(module, Experts)]
    if not every:
        return None
    read = torch.zeros(1, dtype=torch.int32, device=device)
    for experts in every:
        experts.read = read
    return read, sum(experts.count for experts in every)


def clamped_of(experts: Any, mixture: Mixture) -> Clamped | None:
    """Returns the parameters of gpt-oss's activation; None: the gate is silu."""
    if isinstance(experts, SingleExperts):
        return experts.clamped
    if mixture.clamped is None:
        return None
    return getattr(experts, mixture.clamped[0]), getattr(experts, mixture.clamped[1])


def products_of(experts: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Returns the argument ``products`` of SingleExperts; products of stored weights are reused."""
    if isinstance(experts, SingleExperts):
        return [(gate_up, down) for gate_up, down in experts.products]
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    gate_up, down = _weights_of(experts, first), _weights_of(experts, "down_proj")
    return [
        (_linear(*_of_expert(number, *gate_up)), _linear(*_of_expert(number, *down)))
        for number in range(experts.num_experts)
    ]


def _joined(experts: Any, mixture: Mixture, add: Sum | None) -> JoinedExperts | None:
    """Returns experts for kernels of a GPU; None: the kernels cannot multiply by their weights."""
    from outrider.engine.kernels.stored_product import is_multiplied

    gate_up, down = (
        [_behind_stored(of_all) for of_all in zip(*experts.products, strict=True)]
        if isinstance(experts, SingleExperts)
        else [_behind(*_weights_of(experts, name)) for name in ("gate_up_proj", "down_proj")]
    )
    if not (is_multiplied(gate_up[0]) and is_multiplied(down[0])):
        return None
    return JoinedExperts(gate_up, down, clamped_of(experts, mixture), add)


def _weights_of(experts: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Returns weights [experts, outputs, inputs] and biases [experts, outputs]; gates come before ups."""
    weight = local_share(getattr(experts, name))
    weight = weight.transpose(1, 2) if experts.is_transposed else weight
    bias = local_share(getattr(experts, f"{name}_bias")) if experts.has_bias else None
    if name == "gate_up_proj" and not experts.is_concatenated:
        weight = torch.cat([weight[:, ::2], weight[:, 1::2]], 1)
        bias = None if bias is None else torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
    return weight, bias


def _behind(weights: Tensor, biases: Tensor | None) -> Weights:
    """Concatenates the weights and the biases of all experts."""
    rows = weights.reshape(-1, weights.shape[2]).contiguous()
    return nn.Parameter(rows, requires_grad=False), None if biases is None else biases.flatten()


def _behind_stored(products: Sequence[Any]) -> Weights:
    biases = [product.bias for product in products if product.bias is not None]
    weight = joined_weight([product.weight for product in products])
    return weight, torch.cat(biases) if biases else None


def _of_expert(number: int, weights: Tensor, biases: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weights[number], None if biases is None else biases[number]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Returns the fastest linear layer on a CPU."""
    if why_unpacked(weight.dtype, *weight.shape) is None:
        return PackedLinear(weight.contiguous(), bias)
    return joined(weight.contiguous(), bias)
