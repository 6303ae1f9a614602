"""Layers of a rank: its share of each weight as an ordinary tensor, and the exchange between ranks.

transformers decides how weights are shared, and each rank loads only its share. But transformers' layers wrap
each weight and activation again at each call, which costs more than the small products of decoding. So layers
of the common kinds are replaced here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.models.registry import mixtures_in
from outrider.engine.parallel.plan import LOCAL
from outrider.engine.parallel.sums import Sum, add_up, add_up_in_order, gathered, summed

# Names of the classes of linear layers that ranks share.
LINEAR = ("Linear", "StoredLinear")
# Layers with a common input, of which each rank keeps some outputs, and the layer that reads these outputs.
DIVIDED = ((("q_proj", "k_proj", "v_proj"), "o_proj"), (("gate_proj", "up_proj"), "down_proj"))
KEYS_AND_VALUES = ("k_proj", "v_proj")  # projections that may have fewer heads than there are ranks
NORMED = {"q_norm": "q_proj", "k_norm": "k_proj"}  # projections by the names of norms over all their heads
# Styles of transformers' plans after which the ranks' outputs are summed.
EXPERTS = "moe_tp_experts"
SUMMED = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "all_reduce", EXPERTS)


class RowParallelLinear(nn.Module):
    """Linear layer of which each rank has some input features. The bias is added to the ranks' sum."""

    def __init__(self, linear: nn.Linear, add: Sum = add_up, width: int | None = None) -> None:
        """
        Args:
            linear: layer with this rank's share of the weight.
            add: sums over the ranks.
            width: input features of each rank but the last, if rows are whole; None: rows are shares already.
        """
        super().__init__()
        self.bias = linear.bias
        linear.bias = None  # type: ignore[assignment]
        self.linear = linear
        self.add = add
        self.first = None if width is None else dist.get_rank() * width

    def forward(self, rows: Tensor) -> Tensor:
        if self.first is not None:
            rows = rows.narrow(-1, self.first, self.linear.in_features)
        product = self.add(self.linear(rows))
        return product if self.bias is None else product + self.bias


class ParallelNorm(nn.Module):
    """Root mean square norm over the heads of all ranks, of which this rank has some."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """weight: [features of this rank]"""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """Returns rows [..., features of this rank] divided by the root mean square of all features."""
        wide = rows.float()
        squares = summed(gathered(wide.square().sum(-1, keepdim=True)))
        # A head that several ranks hold counts equally often in the sum and in the divisor.
        mean = squares / (rows.shape[-1] * dist.get_world_size())
        return self.weight * (wide * torch.rsqrt(mean + self.epsilon)).to(rows.dtype)


class ParallelExperts(nn.Module):
    """Experts, of each of which every rank has some features. The ranks' outputs are summed."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *given: Tensor) -> Tensor:
        return add_up(self.experts(*given))


class ParallelLMHead(nn.Module):
    """Output projection of which each rank has some tokens. Rank 0, which samples, gathers all logits."""

    def __init__(self, linear: nn.Linear, num_tokens: int) -> None:
        super().__init__()
        self.linear = linear
        self.num_tokens = num_tokens

    def forward(self, rows: Tensor) -> Tensor:
        """Returns [..., num_tokens] of rows [..., features] at rank 0, and a rank's part at other ranks."""
        part: Tensor = self.linear(rows)
        if not rows.numel():
            return part.new_empty(*part.shape[:-1], self.num_tokens)
        width = -(-self.num_tokens // dist.get_world_size())
        part = pad(part, (0, width - part.shape[-1])).contiguous()  # the last rank may have fewer
        if dist.get_rank():
            dist.gather(part)
            return part
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.gather(part, parts)
        return torch.cat(parts, -1)[..., : self.num_tokens]


class VocabParallelEmbedding(nn.Module):
    """Embedding of which each rank has some tokens. A rank's rows are zero for tokens of other ranks."""

    def __init__(self, weight: Tensor, num_tokens: int) -> None:
        """weight: [tokens of this rank, features]; the last rank may have fewer tokens"""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_tokens = num_tokens
        self.first = dist.get_rank() * -(-num_tokens // dist.get_world_size())

    def forward(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self.first
        foreign = (own < 0) | (own >= len(self.weight))
        rows = embedding(own.masked_fill(foreign, 0), self.weight).masked_fill(foreign[..., None], 0.0)
        return add_up(rows)  # rows of all ranks but one are zero, so any order gives equal sums


def use_parallel_layers(model: PreTrainedModel, *, in_order: bool = False) -> None:
    """Replaces transformers' sharded layers of the common kinds, in place, for inference.

    in_order: whether sums over the ranks must not depend on a row's place in its pass.

    Raises:
        UnsupportedModelError: ``in_order`` is set, and a sum is left to transformers.
    """
    # Imported late: older versions of transformers, which serve a single device, lack this module.
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    add = add_up_in_order if in_order else add_up
    summed = {*SUMMED}
    if any(mixtures_in(model)):
        summed -= {EXPERTS}  # outrider/engine/forward/experts.py adds them up
    for name, module in list(model.named_modules()):
        general = replace_layer_number_by_wildcard(name)
        style = model.tp_plan.get(general)
        if style == "replicated_with_grad_allreduce":
            del module.forward  # there are no gradients
        elif style == LOCAL:
            del module.forward
            for own, weight in [*module.named_parameters(recurse=False)]:
                setattr(module, own, nn.Parameter(local_share(weight), requires_grad=False))
        elif f"{general}.weight" in model.tp_plan:
            model.set_submodule(name, _norm_of_heads(module, name, model))
        elif style == "embedding_rowwise" and type(module) is nn.Embedding:
            share = VocabParallelEmbedding(local_share(module.weight), module.num_embeddings)
            model.set_submodule(name, share)
        elif type(module).__name__ in LINEAR:
            if style == "colwise":
                _take_share(module)
                parent, _, kind = name.rpartition(".")
                if kind in KEYS_AND_VALUES:
                    _complete_head(module, kind, model.get_submodule(parent))
            elif style == "rowwise":
                model.set_submodule(name, RowParallelLinear(_take_share(module), add))
            elif style == "rowwise_split_input":
                width = -(-module.in_features // dist.get_world_size())
                model.set_submodule(name, RowParallelLinear(_take_share(module), add, width))
            elif style == "colwise_gather_output" and module is model.get_output_embeddings():
                num_tokens = model.config.get_text_config().vocab_size
                model.set_submodule(name, ParallelLMHead(_take_share(module), num_tokens))
        if style == EXPERTS and hasattr(module, "add"):
            module.add = add  # experts with weights in the stored format
        elif style == EXPERTS and dist.get_rank() and getattr(module, "has_bias", False):
            bias = torch.zeros_like(module.down_proj_bias)  # only rank 0 adds the bias
            module.down_proj_bias = nn.Parameter(bias, requires_grad=False)
        if in_order and style in summed and not isinstance(model.get_submodule(name), RowParallelLinear):
            raise UnsupportedModelError(
                f"batch_invariant=True with tensor_parallel={dist.get_world_size()}: the ranks' parts of"
                f" {name} ({type(module).__name__}, {style}) are added in an order that depends on the other"
                " tokens; give tensor_parallel=1"
            )


def _complete_head(linear: nn.Linear, kind: str, attention: nn.Module) -> None:
    """Gives each rank a whole head of keys or values, if there are more ranks than heads.

    Neighbouring ranks hold the same head, as they also hold neighbouring query heads.
    """
    copies = getattr(attention, "head_dim", 1) // linear.out_features
    if copies <= 1:
        return
    size, rank = dist.get_world_size(), dist.get_rank()
    for name, part in [*linear.named_parameters()]:
        parts = part.new_empty(size * len(part), *part.shape[1:])
        dist.all_gather_single(parts, part.detach().contiguous())
        own = parts.chunk(size // copies)[rank // copies].clone()  # frees the other shares
        setattr(linear, name, nn.Parameter(own, requires_grad=False))
    linear.out_features = len(linear.weight)
    if kind == "k_proj":
        repeat_heads(attention, copies)


def _norm_of_heads(norm: Any, name: str, model: Any) -> ParallelNorm:
    """Returns the norm of this rank's heads, whose projection was reduced to this rank's share before."""
    parent, _, kind = name.rpartition(".")
    width: int = getattr(model.get_submodule(parent), NORMED[kind]).out_features
    whole: Tensor = norm.weight.full_tensor()
    copies = width * dist.get_world_size() // len(whole)  # ranks that hold the same heads
    own = whole.detach().narrow(0, dist.get_rank() // copies * width, width).clone()
    return ParallelNorm(own, norm.variance_epsilon)


def repeat_heads(attention: nn.Module, copies: int) -> None:
    """Tells attention that ``copies`` ranks hold each key/value head, each with fewer query heads."""
    groups: int | None = getattr(attention, "num_key_value_groups", None)
    if groups is not None:
        vars(attention)["num_key_value_groups"] = groups // copies


def share_out(module: nn.Module, rank: int, ranks: int) -> bool:
    """Reduces layers to this rank's share, in place: heads of attention, and features of MLPs and experts.

    It is for layers without a plan of transformers. A layer of another structure, or that cannot be divided
    evenly, stays whole at all ranks.

    Returns:
        whether attention is shared, and with it the key/value heads that a rank caches.
    """
    shares_heads = False
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if _divide_experts(child, rank, ranks):
                setattr(parent, name, ParallelExperts(child))
        for columns, row in DIVIDED:
            named = [getattr(parent, name, None) for name in (*columns, row)]
            layers = [layer for layer in named if isinstance(layer, nn.Linear)]
            unit = getattr(parent, "head_dim", 1)
            if len(layers) < len(named) or not _are_divisible(layers, ranks * unit):
                continue
            for layer in layers[:-1]:
                keep_outputs(layer, rank, ranks)
            _keep(layers[-1], "weight", 1, rank, ranks)
            setattr(parent, row, RowParallelLinear(layers[-1]))
            shares_heads |= row == "o_proj"
    return shares_heads


def _divide_experts(module: nn.Module, rank: int, ranks: int) -> bool:
    """Reduces transformers' joined experts to this rank's features; returns False if that is not possible."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
        return False
    kinds = {"is_transposed": False, "has_bias": False, "is_concatenated": True}
    width, rest = divmod(down.shape[-1], ranks)
    if rest or any(getattr(module, name, usual) != usual for name, usual in kinds.items()):
        return False
    halves = [half.narrow(1, rank * width, width) for half in gate_up.detach().chunk(2, 1)]
    shares = torch.cat(halves, 1), down.detach().narrow(2, rank * width, width).clone()
    for name, share in zip(("gate_up_proj", "down_proj"), shares, strict=True):
        setattr(module, name, nn.Parameter(share, requires_grad=False))
    return True


def _are_divisible(layers: list[nn.Linear], width: int) -> bool:
    """Whether ``width`` divides the outputs of all layers but the last, which reads the first's outputs."""
    first, *_, last = layers
    return last.in_features == first.out_features and not any(
        layer.out_features % width for layer in layers[:-1]
    )


def keep_outputs(linear: nn.Linear, rank: int, ranks: int) -> nn.Linear:
    """Reduces a whole layer to this rank's outputs; the last rank may have fewer."""
    for name, _ in [*linear.named_parameters()]:
        _keep(linear, name, 0, rank, ranks)
    return linear


def _keep(linear: nn.Linear, name: str, dim: int, rank: int, ranks: int) -> None:
    whole = linear.get_parameter(name)
    width = -(-whole.shape[dim] // ranks)
    first = min(rank * width, whole.shape[dim])
    share = whole.detach().narrow(dim, first, min(width, whole.shape[dim] - first))
    share = share.clone(memory_format=torch.contiguous_format)  # frees the whole weight
    setattr(linear, name, nn.Parameter(share, requires_grad=False))
    linear.out_features, linear.in_features = linear.weight.shape


def _take_share(linear: Any) -> Any:
    """Turns a layer that transformers sharded into an ordinary layer with this rank's share.

    A layer with a stored weight has only its share already.
    """
    if type(linear) is not nn.Linear:
        return linear
    del linear.forward
    for name, weight in linear.named_parameters():
        setattr(linear, name, nn.Parameter(local_share(weight), requires_grad=False))
    linear.out_features, linear.in_features = linear.weight.shape
    return linear


def local_share(weight: Tensor) -> Tensor:
    """Returns this rank's share, or all of a tensor that is not shared, such as a single scale."""
    share: Tensor = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
    return share
