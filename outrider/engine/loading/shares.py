"""Division of a model between tensor-parallel ranks by transformers' plan, before any weight is read."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.kernels.stored_weight import StoredWeight
from outrider.engine.loading.kinds import check_kind, check_states, has_states
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint, are_together, is_quantized
from outrider.engine.loading.text_part import served_config
from outrider.engine.models.registry import mixtures_in
from outrider.engine.parallel.plan import (
    ROWWISE,
    WHOLE,
    Plan,
    generic,
    is_shared,
    style_of_parameter,
    style_of_stored,
)
from outrider.engine.settings import EngineSettings

# Projections whose outputs contain keys, by name in plans. Several ranks may hold the same head of k_proj.
KEYS = ("k_proj", "kv_b_proj", "qkv_proj", "query_key_value")
# Styles in which layers with stored weights can be shared.
STORED_STYLES = ("colwise", "packed_colwise", "rowwise", "rowwise_split_input")
DIVIDED = "colwise"  # style in which each rank computes and keeps its own outputs
STATE_HEADS = "linear_num_key_heads"  # key heads of recurrent layers, each with value heads of its own
KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")
LEAST_SHARED = 0.6  # least shared part of the weights; with less, more ranks hardly save memory
NAMED = 4  # kinds of weights that a message names


def numbers_of(config: Any, name: str) -> set[int]:
    """Returns the values of a text config's field over all layers; empty if it lacks the field."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = [getattr(layer, name, None) for layer in layers]
    lists = [value if isinstance(value, list | tuple) else [value] for value in values]
    return {number for numbers in lists for number in numbers if isinstance(number, int)}


def key_projection(attention: str, plan: Plan) -> tuple[str, str] | None:
    """Returns name and style of the projection to a layer's keys; None: it is not in the plan.

    attention: name of the layer's attention module.
    """
    for name in KEYS:
        if style := plan.get(f"{generic(attention)}.{name}"):
            return name, style
    return None


def heads_of_rank(heads: int, attention: str, plan: Plan, ranks: int) -> int:
    """Returns the key/value heads of a layer that each rank caches, if ``check_shares`` has passed."""
    found = key_projection(attention, plan)
    return max(heads // ranks, 1) if found is not None and found[1] == DIVIDED else heads


def ranks_that_share(parameter: str, plan: Plan, ranks: int, heads: int | None) -> int:
    """Returns the number of parts into which a parameter is divided; 1: every rank holds all of it.

    heads: key/value heads that the parameter makes, which limit the number of parts; None: no such heads.
    """
    if not is_shared(parameter, plan):
        return 1
    is_divided = style_of_parameter(parameter, plan) == DIVIDED
    return min(ranks, heads) if heads is not None and is_divided else ranks


def check_shares(settings: EngineSettings) -> None:
    """Checks whether ranks can share the model, from the checkpoint's config alone.

    Raises:
        UnsupportedModelError: this number of ranks cannot share the model, or shares too little of it. The
            message names numbers that can.
    """
    size = settings.tensor_parallel
    if size == 1:
        return
    whole = served_config(settings.model)
    config = whole.get_text_config()
    check_kind(whole, settings.model)
    check_states(whole, settings)
    given = f"tensor_parallel={size}: model={settings.model!r}"
    if not config.base_model_tp_plan:
        raise UnsupportedModelError(
            f"tensor_parallel={size}: transformers has no plan to share model={settings.model!r} between "
            f"devices, a {config.model_type}; give 1"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    _check_heads(config, model.tp_plan, size, given)
    _check_experts(model, size, given, is_stored=is_quantized(whole))
    _check_bytes(model, given)
    if is_quantized(whole):
        _check_stored(StoredCheckpoint(whole, settings.model).layers(model), model, size, given)


def _check_heads(config: Any, plan: Plan, size: int, given: str) -> None:
    """Raises UnsupportedModelError if a head would be split."""
    divided = {name.rpartition(".")[2] for name, style in plan.items() if style == DIVIDED} & {*KEYS}
    if not divided:
        return  # every rank computes all heads
    # Keys that are expanded from latent vectors have as many heads as queries.
    counted = () if divided == {"kv_b_proj"} else KV_HEADS
    for name in (*counted, "num_attention_heads"):
        for count in sorted(numbers_of(config, name)):
            if count % size == 0:
                continue
            may_repeat = divided == {"k_proj"} and name in KV_HEADS
            copies, rest = divmod(size, count)
            if may_repeat and not rest and not any(dim % copies for dim in _head_dims(config)):
                continue  # ``copies`` ranks hold the same head
            wanted, heads = f"a divisor of {count}", numbers_of(config, "num_attention_heads")
            if may_repeat:
                wanted += f", or a multiple of it that divides num_attention_heads={min(heads)}"
            raise UnsupportedModelError(
                f"{given} has {name}={count}, which they cannot share evenly; give {wanted}"
            )
    for count in numbers_of(config, STATE_HEADS) if has_states(config) else ():
        if count % size:
            raise UnsupportedModelError(
                f"{given} has {STATE_HEADS}={count}, which they cannot share evenly;"
                f" give a divisor of {count}"
            )


def _check_experts(model: Any, size: int, given: str, *, is_stored: bool) -> None:
    """Raises UnsupportedModelError if ranks cannot share the features of experts evenly."""
    for path, mlp, mixture in mixtures_in(model):
        experts = getattr(mlp, mixture.experts)
        width = experts.down_proj.shape[1 if experts.is_transposed else 2]
        if width % size and not (is_stored and are_together(mixture)):
            raise UnsupportedModelError(
                f"{given} has {width} features in each expert of {path}, which they cannot share evenly;"
                f" give a divisor of {width}"
            )


def _check_stored(layers: Mapping[str, StoredWeight], model: Any, size: int, given: str) -> None:
    """Raises UnsupportedModelError if ranks cannot share a quantized layer, or cannot share it evenly."""
    for name, weight in layers.items():
        style = style_of_stored(name, model)
        if style is None or style in WHOLE:
            continue
        if style not in STORED_STYLES:
            raise UnsupportedModelError(
                f"{given} shares {name} by transformers' {style}, and quantized layers are shared by"
                f" {', '.join(STORED_STYLES)} alone; give 1"
            )
        of, count = ("inputs", weight.shape[1]) if style in ROWWISE else ("outputs", weight.shape[0])
        if count % size:
            raise UnsupportedModelError(
                f"{given} has {count} {of} of {name} in {weight.kind}, which they cannot share evenly;"
                f" give a divisor of {count}"
            )


def _head_dims(config: Any) -> set[int]:
    return numbers_of(config, "head_dim") or {config.hidden_size // config.num_attention_heads}


def _check_bytes(model: Any, given: str) -> None:
    """Raises UnsupportedModelError if each rank would hold most of the model."""
    whole: dict[str, int] = {}
    total = 0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if not is_shared(name, model.tp_plan):
            whole[generic(name)] = whole.get(generic(name), 0) + weight.numel()
    shared = 1 - sum(whole.values()) / total
    if shared < LEAST_SHARED:
        largest = sorted(whole, key=lambda name: -whole[name])[:NAMED]
        raise UnsupportedModelError(
            f"{given} is a {model.config.get_text_config().model_type}, of whose weights transformers' plan"
            f" shares only {shared:.0%}: every device would hold all of {', '.join(largest)}; give 1"
        )
