"""A model's tensor-parallel plan in transformers: a style for each module or parameter that ranks share."""

from collections.abc import Mapping

Plan = Mapping[str, str]  # from names with * in the place of numbers


def generic(name: str) -> str:
    """As the plan names it: of any layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def style_of_parameter(name: str, plan: Plan) -> str | None:
    """Its own, or that of its module; None: ranks do not share it."""
    return plan.get(generic(name)) or plan.get(generic(name).rpartition(".")[0])
