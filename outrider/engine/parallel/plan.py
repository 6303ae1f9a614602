"""Tensor-parallel plan of a model in transformers: a style for each module or parameter that ranks share."""

from collections.abc import Mapping
from typing import Any

Plan = Mapping[str, str]  # styles by names with * in place of numbers

LOCAL = "local_params"  # style of a module whose own parameters are shared in part
# Styles that share no weight: they concern outputs or gradients.
WHOLE = (
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    LOCAL,
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "sequence_parallel",
)
ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")  # styles whose bias stays whole
# Parameters that ranks share by heads of recurrent layers, without a style (engine/forward/delta_net.py).
OF_HEADS = tuple(f"linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias"))
TRANSPOSED = {"rowwise": "colwise", "colwise": "rowwise"}

# Our plans by type of text config. They override transformers' plans, which leave these layers whole or
# gather their outputs. With our plans a rank continues with its own heads.
_DELTA_NET = "layers.*.linear_attn."
_QWEN3_5 = {f"{_DELTA_NET}in_proj_{part}": "colwise" for part in ("qkv", "z", "b", "a")}
_QWEN3_5[f"{_DELTA_NET}out_proj"] = "rowwise"
_ATTENTION, _EXPERTS = "layers.*.self_attn.", "layers.*.mlp.experts"
_HEADS = {f"{_ATTENTION}{name}_proj": "colwise" for name in "qkv"} | {f"{_ATTENTION}o_proj": "rowwise"}
OURS: Mapping[str, Plan] = {
    "qwen3_next": {
        f"{_DELTA_NET}in_proj_qkvz": "colwise",
        f"{_DELTA_NET}in_proj_ba": "colwise",
        f"{_DELTA_NET}out_proj": "rowwise",
    },
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    # Its norms over all heads become ParallelNorm (outrider/engine/parallel/layers.py).
    "minimax_m2": {**_HEADS, **{f"{_ATTENTION}{name}_norm.weight": "colwise" for name in "qk"}},
    # Its experts are stored as [inputs, outputs], and outputs of gate and up alternate.
    "gpt_oss": {
        **_HEADS,
        f"{_ATTENTION}sinks": "colwise",
        _ATTENTION.removesuffix("."): LOCAL,
        f"{_EXPERTS}.gate_up_proj": "rowwise",
        f"{_EXPERTS}.gate_up_proj_bias": "rowwise",
        f"{_EXPERTS}.down_proj": "colwise",
        _EXPERTS: "moe_tp_experts",
    },
}


def use_own_plan(config: Any) -> None:
    """Overrides transformers' plan in a config by our plan, in place."""
    text = config.get_text_config()
    if ours := OURS.get(text.model_type):
        text.base_model_tp_plan = {**text.base_model_tp_plan, **ours}


def generic(name: str) -> str:
    """Returns a name in the plan's form, with * in place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def style_of_parameter(name: str, plan: Plan) -> str | None:
    """Returns the style of a parameter, or of its module; None: ranks do not share it."""
    return plan.get(generic(name)) or plan.get(generic(name).rpartition(".")[0])


def style_of_stored(name: str, model: Any) -> str | None:
    """Returns the style of a weight [outputs, inputs] of a model of transformers.

    name: name of a linear layer, or of the weights of a layer's experts, which the model may hold transposed.
    """
    style = style_of_parameter(f"{name}.weight", model.tp_plan)
    if style in TRANSPOSED and getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False):
        return TRANSPOSED[style]
    return style


def is_shared(parameter: str, plan: Plan) -> bool:
    """Whether each rank holds a part of the parameter."""
    if parameter.endswith(OF_HEADS):
        return True
    style = style_of_parameter(parameter, plan)
    is_whole_bias = style in ROWWISE and parameter.endswith(".bias")
    return style is not None and style not in WHOLE and not is_whole_bias
