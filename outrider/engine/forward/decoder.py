"""Fast forward pass of the architectures in outrider/engine/models, with few operations per layer.

transformers computes a layer by some sixty operations in ten modules. If a step takes a few milliseconds,
launching these operations takes longer than their arithmetic, on a CPU and on a GPU. Here a layer is about
twenty operations, on a GPU ten kernels, and calls no module except for its matrix products:

- queries, keys and values are a single product, as are gate and up, and a product adds the residual;
- with tensor parallelism, states are summed over the ranks, and rank 0 alone adds the residual to its part;
- queries and keys are rotated together, by cosines and sines that are computed once per step;
- a norm reads its numbers once;
- experts are computed by outrider/engine/forward/experts.py, which also adds the residual;
- the final norm is computed only for the rows whose logits are wanted.

The result equals that of transformers up to rounding. The self-check compares the two at load.
"""

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.engine.forward.attention import Paged, attended
from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.forward.experts import ExpertRouter, Experts, weighed
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.layer_operations import Heads, LayerOperations, Norm, PlainOperations
from outrider.engine.forward.linear import Projection, adding, function_of
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.models.architecture import Architecture, Mixture
from outrider.engine.models.registry import architecture_of
from outrider.engine.parallel.layers import ParallelNorm, RowParallelLinear
from outrider.engine.parallel.sums import Sum, add_up_in_order, gathered

Part = Callable[[Tensor, Tensor], Tensor]  # states and rows [num_tokens, ...] to a part of the next states


class Decoder:
    """Forward pass of a model in the registry, or of a rank's share. Its linear layers may be our own."""

    def __init__(
        self,
        model: Any,
        architecture: Architecture,
        hidden_layers: Collection[int],
        operations: LayerOperations,
    ) -> None:
        """hidden_layers: layers whose states are wanted, as transformers numbers them; 0: the embeddings."""
        part = model.get_submodule
        self._operations = operations
        self._embedding = part(architecture.embedding)
        layers = part(architecture.layers)
        norms = [_norm_of(layer.get_submodule(architecture.attention_norm)) for layer in layers]
        self._first_norm = norms[0]
        self._layers = [
            _Layer(layer, next_norm, architecture, operations)
            for layer, next_norm in zip(layers, [*norms[1:], None], strict=True)
        ]
        self._rotary = part(architecture.rotary)
        self._norm = norm = part(architecture.last_norm)  # may be another module in a part of the model
        self._usual_norm = _norm_of(norm) if hasattr(norm, "variance_epsilon") else None
        self._head = function_of(part(architecture.head))
        self._hidden_layers = tuple(number % (1 + len(self._layers)) for number in hidden_layers)

    def __call__(self, paged: Paged) -> tuple[Tensor, Tensor | None]:
        """Runs the forward pass of a step.

        Returns:
            logits [num_logits, vocab_size], at ranks other than 0 their share of the vocabulary, and states
            [num_tokens, num_hidden_layers, hidden_size], None if no layer is wanted.
        """
        batch = paged.batch
        states = self._embedding(batch.token_ids[0])  # [num_tokens, hidden_size]
        rotation = self._rotation(batch.position_ids[0], states.dtype)
        last = len(self._layers)
        kept = {0: states.clone()} if 0 in self._hidden_layers else {}
        normed = self._operations.normed(states, self._first_norm)
        for number, layer in enumerate(self._layers, 1):
            states, normed = layer(states, normed, rotation, paged)
            if number in self._hidden_layers and number < last:
                kept[number] = states.clone()  # copied, because a layer adds to the states in place
        if last in self._hidden_layers:  # the states of the last layer are returned normed
            states = kept[last] = self._normed(states)
            wanted = states[batch.logit_rows]
        else:
            wanted = self._normed(states[batch.logit_rows])
        hidden = [kept[number] for number in self._hidden_layers]
        return self._head(wanted), torch.stack(hidden, dim=1) if hidden else None

    def _normed(self, states: Tensor) -> Tensor:
        if self._usual_norm is None:
            return self._norm(states)  # type: ignore[no-any-return]
        return self._operations.normed(states, self._usual_norm)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines, and sines with a negated first half: [num_tokens, 1, rotated dimensions] each."""
        angles = positions[:, None].float() * self._rotary.inv_freq
        scale = self._rotary.attention_scaling
        cosines, sines = angles.cos() * scale, angles.sin() * scale
        joined = torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)
        return joined[0][:, None].to(dtype), joined[1][:, None].to(dtype)


class _Layer:
    """Decoder layer."""

    def __init__(
        self, layer: Any, next_norm: Norm | None, architecture: Architecture, operations: LayerOperations
    ) -> None:
        """next_norm: norm of the next layer's attention; None: it is the last layer."""
        attention: Any = layer.get_submodule(architecture.attention)
        mlp: Any = layer.get_submodule(architecture.mlp)
        self._operations = operations
        self._attention = attention
        self._scaling: float = attention.scaling
        # Read at each step, because the self-check shortens windows temporarily.
        self._window = None if architecture.window is None else attrgetter(architecture.window)
        shared = getattr(attention, architecture.query_key_value[0]).shared
        self._query_key_value = function_of(shared.product)
        dim: int = attention.head_dim
        queries, kv, _ = (width // dim for width in shared.widths)
        named = architecture.query_key_norm or ()  # GLM-4.5-Air has no such norms
        norms = [getattr(attention, name) for name in named if hasattr(attention, name)]
        self._shared_norms = [norm for norm in norms if isinstance(norm, ParallelNorm)]
        own = () if self._shared_norms else _norms_of_heads(norms, queries, kv, dim)
        self._heads = Heads(attention.layer_idx, queries, kv, dim, own)
        self._sinks = None if architecture.sinks is None else attrgetter(architecture.sinks)(attention)
        mlp_norm = _norm_of(layer.get_submodule(architecture.mlp_norm))
        output = getattr(attention, architecture.attention_output)
        self._add_output = _adding_product(output, mlp_norm, operations)
        self._add_mlp = _mlp_of(mlp, architecture, next_norm, operations)

    def __call__(
        self, states: Tensor, normed: Tensor, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer.

        Args:
            states: [num_tokens, hidden_size]
            normed: states after the norm of this layer's attention

        Returns:
            next states, possibly in the memory of ``states``, and these after the norm of the next layer's
            attention. The last layer returns the states twice.
        """
        operations, heads = self._operations, self._heads
        product = self._query_key_value(normed)
        first = 0
        for norm in self._shared_norms:
            part = product.narrow(1, first, len(norm.weight))
            part.copy_(norm(part))
            first += len(norm.weight)
        product = product.view(states.shape[0], -1, heads.dim)
        query = operations.rotated_and_stored(product, heads, rotation, paged)
        output = attended(
            paged,
            heads.layer,
            query.transpose(0, 1),
            scaling=self._scaling,
            window=None if self._window is None else self._window(self._attention),
            sinks=self._sinks,
        )
        states, normed = self._add_output(states, output.flatten(1))
        return self._add_mlp(states, normed)


def _mlp_of(
    mlp: Any, architecture: Architecture, norm: Norm | None, operations: LayerOperations
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function that adds the MLP or the experts of rows to states, and norms the sum."""
    if mixture := _mixture_of(mlp, architecture):
        part = _part_of_mixture(mlp, architecture, mixture, operations)
        return _adding_and_norming(part, getattr(mlp, mixture.experts).add, None, norm, operations)
    gate_up = function_of(getattr(mlp, architecture.gate_up[0]).shared.product)
    add_down = _adding_product(getattr(mlp, architecture.down), norm, operations)
    return lambda states, rows: add_down(states, operations.gated(gate_up(rows)))


def _mixture_of(mlp: nn.Module, architecture: Architecture) -> Mixture | None:
    """Returns the mixture of a layer; None if the layer has a gated MLP."""
    mixture = architecture.mixture
    return mixture if mixture is not None and hasattr(mlp, mixture.experts) else None


def _norm_of(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _norms_of_heads(norms: Sequence[Any], queries: int, kv: int, dim: int) -> tuple[Norm, ...]:
    """Returns norms of query and key heads: for each head, or for all heads together."""
    if not norms:
        return ()
    query, key = norms
    if query.weight.numel() > dim:
        return tuple(Norm(norm.weight[None], norm.variance_epsilon) for norm in norms)
    weights = [query.weight.expand(queries, -1), key.weight.expand(kv, -1)]
    return (Norm(torch.cat(weights), query.variance_epsilon),)


def _adding_and_norming(
    part: Part, add: Sum | None, bias: Tensor | None, norm: Norm | None, operations: LayerOperations
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function that takes states and rows, and returns the next states before and after a norm.

    Args:
        part: computes this rank's part of the next states.
        add: sums over the ranks; None: the part is the whole sum.
        bias: added after the sum over the ranks.
        norm: norm of the next states; None: the function returns the states twice.
    """
    if norm is not None and add is add_up_in_order and bias is None:
        return lambda states, rows: operations.summed_and_normed(gathered(part(states, rows)), norm)

    def add_and_norm(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        states = part(states, rows)
        if add is not None:
            states = add(states)
        if bias is not None:
            states = states.add_(bias)
        return states, states if norm is None else operations.normed(states, norm)

    return add_and_norm


def _adding_product(
    product: nn.Module, norm: Norm | None, operations: LayerOperations
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function that adds the product of rows to states, and norms the sum."""
    part = _part_of(product)
    if isinstance(product, RowParallelLinear):
        return _adding_and_norming(part, product.add, product.bias, norm, operations)
    return _adding_and_norming(part, None, None, norm, operations)


def _part_of(product: nn.Module) -> Part:
    """Returns a function from states and rows to this rank's part of the sum of states and product.

    Rank 0 includes the states in its part, so that no rank needs another kernel to add them.
    """
    if not isinstance(product, RowParallelLinear):
        return adding(product)
    if dist.get_rank() == 0:
        return adding(product.linear)
    multiply = function_of(product.linear)
    return lambda states, rows: multiply(rows)


def _part_of_mixture(
    mlp: Any, architecture: Architecture, mixture: Mixture, operations: LayerOperations
) -> Part:
    """Returns a function from states and rows to this rank's part of the sum of states and experts."""
    experts: Experts = getattr(mlp, mixture.experts)
    route = ExpertRouter(mixture, mlp, operations)
    is_first = experts.add is None or dist.get_rank() == 0
    shared = None if mixture.shared is None else mlp.get_submodule(mixture.shared)
    down: Any = None if shared is None else getattr(shared, architecture.down)
    # A shared expert that is not divided among ranks is computed by rank 0 alone.
    if shared is None or not (is_first or isinstance(down, RowParallelLinear)):
        return lambda states, rows: experts.multiply(rows, *route(rows), states if is_first else None)
    gate_up = function_of(getattr(shared, architecture.gate_up[0]).shared.product)
    if mixture.shared_gate is None:
        add_down = _part_of(down)
        return lambda states, rows: experts.multiply(
            rows, *route(rows), add_down(states, operations.gated(gate_up(rows)))
        )
    multiply = function_of(down.linear if isinstance(down, RowParallelLinear) else down)
    weigh = function_of(mlp.get_submodule(mixture.shared_gate))

    def part(states: Tensor, rows: Tensor) -> Tensor:
        product = weighed(multiply(operations.gated(gate_up(rows))), weigh(rows))
        return experts.multiply(rows, *route(rows), product + states if is_first else product)

    return part


def decoder_of(model: Any, hidden_layers: Collection[int], operations: LayerOperations) -> Decoder | None:
    """Returns the decoder; None if the registry has no architecture that the model's layers match."""
    architecture = architecture_of(model)
    if architecture is None or getattr(model.config, architecture.activation) != "silu":
        return None
    for layer in model.get_submodule(architecture.layers):
        mlp, attention = layer.get_submodule(architecture.mlp), layer.get_submodule(architecture.attention)
        joined = [getattr(attention, architecture.query_key_value[0])]
        if mixture := _mixture_of(mlp, architecture):
            if not isinstance(getattr(mlp, mixture.experts), Experts):
                return None
            mlp = None if mixture.shared is None else mlp.get_submodule(mixture.shared)
        if mlp is not None:
            joined.append(getattr(mlp, architecture.gate_up[0]))
        if not all(isinstance(projection, Projection) for projection in joined):
            return None
    return Decoder(model, architecture, hidden_layers, operations)


def layer_operations(kernel: Kernel | None, device: torch.device, dtype: torch.dtype) -> LayerOperations:
    """Returns the fastest operations for layers on this device. kernel: attention kernel, if any."""
    if device.type == "cpu" and dtype == torch.float32 and compiled() is not None:
        return CpuOperations()
    if kernel is None or device.type != "cuda":
        return PlainOperations()
    from outrider.engine.forward.cuda_operations import FusedOperations

    return FusedOperations(torch.cuda.get_device_capability(device))
