"""Decoders that outrider/engine/models describes, computed in few operations.

transformers writes a layer as some sixty operations in ten modules. If a step takes a few milliseconds,
starting these takes longer than their arithmetic, on a CPU and on a GPU. Here a layer is about twenty
operations, on a GPU ten kernels, and no module but its matrix products:

- queries, keys and values come from one product, gate and up from one, and a product adds the residual;
- ranks that share the model sum up states: rank 0 has added the residual to its part, the other ranks not;
- queries and keys are rotated together, by cosines and sines that are computed once per step;
- a norm reads its numbers once;
- of the last layer's states only the rows whose logits are wanted are normed.

The result is within rounding of transformers'. The self-check compares the two at load.
"""

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.engine.forward.attention import Paged, attended
from outrider.engine.forward.cpu_operations import CpuOperations
from outrider.engine.forward.kernel import Kernel
from outrider.engine.forward.layer_operations import Heads, LayerOperations, Norm, PlainOperations
from outrider.engine.forward.linear import AddingLinear, Projection
from outrider.engine.kernels.cpu.functions import compiled
from outrider.engine.models.architecture import Architecture
from outrider.engine.models.registry import architecture_of
from outrider.engine.parallel.layers import RowParallelLinear
from outrider.engine.parallel.sums import add_up_in_order, gathered


class Decoder:
    """Forward pass of a described model, or of a rank's share. Its linear layers may have been replaced."""

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
        self._norm = norm = part(architecture.last_norm)  # another module in a part of the model
        self._usual_norm = _norm_of(norm) if hasattr(norm, "variance_epsilon") else None
        self._head = _function_of(part(architecture.head))
        self._hidden_layers = tuple(number % (1 + len(self._layers)) for number in hidden_layers)

    def __call__(self, paged: Paged) -> tuple[Tensor, Tensor | None]:
        """Computes a step's pass.

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
                kept[number] = states.clone()  # a layer adds to the states in place
        if last in self._hidden_layers:  # states of the last layer are kept normed
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
        """Returns cosines, and sines with a negated first half: [num_tokens, 1, head_dim] each."""
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
        # Read at each step: the self-check shortens windows for a while.
        self._window = None if architecture.window is None else attrgetter(architecture.window)
        shared = getattr(attention, architecture.query_key_value[0]).shared
        self._query_key_value = _function_of(shared.product)
        dim: int = attention.head_dim
        queries, kv, _ = (width // dim for width in shared.widths)
        norms = [getattr(attention, name) for name in architecture.query_key_norm or ()]
        self._heads = Heads(attention.layer_idx, queries, kv, dim, _norm_of_heads(norms, queries, kv))
        mlp_norm = _norm_of(layer.get_submodule(architecture.mlp_norm))
        output = getattr(attention, architecture.attention_output)
        self._add_output = _adding_and_norming(output, mlp_norm, operations)
        self._gate_up = _function_of(getattr(mlp, architecture.gate_up[0]).shared.product)
        self._add_down = _adding_and_norming(getattr(mlp, architecture.down), next_norm, operations)

    def __call__(
        self, states: Tensor, normed: Tensor, rotation: tuple[Tensor, Tensor], paged: Paged
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer.

        Args:
            states: [num_tokens, hidden_size]
            normed: states by the norm of this layer's attention

        Returns:
            states, possibly in the memory of ``states``, and the states by the norm of the next layer's
            attention; after the last layer the states twice.
        """
        operations, heads = self._operations, self._heads
        product = self._query_key_value(normed)
        product = product.view(states.shape[0], -1, heads.dim)
        query = operations.rotated_and_stored(product, heads, rotation, paged)
        output = attended(
            paged,
            heads.layer,
            query.transpose(0, 1),
            scaling=self._scaling,
            window=None if self._window is None else self._window(self._attention),
        )
        states, normed = self._add_output(states, output.flatten(1))
        return self._add_down(states, operations.gated(self._gate_up(normed)))


def _norm_of(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _norm_of_heads(norms: Sequence[Any], queries: int, kv: int) -> Norm | None:
    """Returns one norm for all query and key heads; None if the model norms no heads."""
    if not norms:
        return None
    query, key = norms
    weights = [query.weight.expand(queries, -1), key.weight.expand(kv, -1)]
    return Norm(torch.cat(weights), query.variance_epsilon)


def _function_of(product: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the product of rows [num_rows, in_features], without a module's hooks if possible."""
    return product.multiply if isinstance(product, AddingLinear) else product


def _adding_and_norming(
    product: nn.Module, norm: Norm | None, operations: LayerOperations
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function that adds the product of rows to states, and norms the sum.

    The function returns the sum and its norm; without ``norm`` the sum twice.
    """
    add = _adding(product)
    if norm is None:
        return lambda states, rows: (add(states, rows),) * 2
    in_order = isinstance(product, RowParallelLinear) and product.add is add_up_in_order
    if in_order and product.bias is None:
        part = _part_of(product)
        return lambda states, rows: operations.summed_and_normed(gathered(part(states, rows)), norm)

    def add_and_norm(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        states = add(states, rows)
        return states, operations.normed(states, norm)

    return add_and_norm


def _adding(product: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that adds the product of rows to states, in place if possible."""
    if isinstance(product, RowParallelLinear):
        return _adding_over_ranks(product)
    if isinstance(product, AddingLinear):
        multiply = product.multiply
        return lambda states, rows: multiply(rows, states)
    if type(product) is nn.Linear and product.bias is None:
        weight = product.weight.t()
        return lambda states, rows: states.addmm_(rows, weight)
    return lambda states, rows: product(rows).add_(states)


def _adding_over_ranks(product: RowParallelLinear) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that adds the product of the rows of all ranks to states, which all ranks have.

    Rank 0 exchanges its part with the states in it, so that no rank needs another kernel to add them.
    """
    add_up, bias, part = product.add, product.bias, _part_of(product)
    if bias is None:
        return lambda states, rows: add_up(part(states, rows))
    return lambda states, rows: add_up(part(states, rows)).add_(bias)


def _part_of(product: RowParallelLinear) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function from states and rows to this rank's part of their sum."""
    if dist.get_rank() == 0:
        return _adding(product.linear)
    multiply = _function_of(product.linear)
    return lambda states, rows: multiply(rows)


def decoder_of(model: Any, hidden_layers: Collection[int], operations: LayerOperations) -> Decoder | None:
    """Returns the decoder; None if the model has no row, or its layers are not as the row says."""
    architecture = architecture_of(model)
    if architecture is None or getattr(model.config, architecture.activation) != "silu":
        return None
    for layer in model.get_submodule(architecture.layers):
        for module, names in (
            (architecture.attention, architecture.query_key_value),
            (architecture.mlp, architecture.gate_up),
        ):
            if not isinstance(getattr(layer.get_submodule(module), names[0]), Projection):
                return None
    return Decoder(model, architecture, hidden_layers, operations)


def layer_operations(kernel: Kernel | None, device: torch.device, dtype: torch.dtype) -> LayerOperations:
    """Returns the fastest operations for layers on this device. kernel: kernel of attention, if any."""
    if device.type == "cpu" and dtype == torch.float32 and compiled() is not None:
        return CpuOperations()
    if kernel is None or device.type != "cuda":
        return PlainOperations()
    from outrider.engine.forward.cuda_operations import FusedOperations

    return FusedOperations(torch.cuda.get_device_capability(device))
