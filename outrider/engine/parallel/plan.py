"""Tensor-parallel plan of a model in transformers: a style for each module or parameter that ranks share."""

from collections.abc import Mapping

Plan = Mapping[str, str]  # styles by names with * in place of numbers

# Styles that share no weight: they concern outputs or gradients.
WHOLE = (
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "local_params",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "sequence_parallel",
)
ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")  # styles whose bias stays whole


def generic(name: str) -> str:
    """Returns a name in the plan's form, with * in place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def style_of_parameter(name: str, plan: Plan) -> str | None:
    """Returns the style of a parameter, or of its module; None: ranks do not share it."""
    return plan.get(generic(name)) or plan.get(generic(name).rpartition(".")[0])


def is_shared(parameter: str, plan: Plan) -> bool:
    """Whether each rank holds a part of the parameter."""
    style = style_of_parameter(parameter, plan)
    is_whole_bias = style in ROWWISE and parameter.endswith(".bias")
    return style is not None and style not in WHOLE and not is_whole_bias
