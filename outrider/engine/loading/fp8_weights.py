"""Weights of a quantized checkpoint that a GPU keeps in FP8, from its config alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from outrider.engine.parallel.plan import style_of_parameter

FP8_STRATEGIES = ("channel", "tensor")  # scales of compressed-tensors that transformers' product takes
SCALE_BYTES = 4  # bytes of a float32
# Which dimension of a weight a tensor-parallel style splits, and into how many parts for each rank.
SPLITS = {
    "colwise": (-2, 1),
    "colwise_gather_output": (-2, 1),
    "colwise_rep": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "rowwise_rep": (-1, 1),
    "rowwise_split_input": (-1, 1),
    "packed_rowwise": (-1, 2),
}


@dataclass(frozen=True)
class Fp8Weight:
    """A weight of one linear layer, or of one kind of layer of all experts, that stays in FP8."""

    shape: torch.Size  # [..., outputs, inputs]
    num_bytes: int  # scales included
    style: str | None  # tensor-parallel style that splits it


def fp8_weights(config: Any) -> dict[str, Fp8Weight]:
    """Returns the weights that a GPU keeps in FP8, by name; empty if there are none.

    config: of transformers, of a checkpoint that is quantized.
    """
    quantization: dict[str, Any] = config.quantization_config
    method = quantization.get("quant_method")
    if method == "fp8":
        return _weights_of_transformers(config, quantization)
    return _weights_of_compressed_tensors(config, quantization) if method == "compressed-tensors" else {}


def schemes(quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemes of compressed-tensors, each for some of the layers."""
    return [*(quantization.get("config_groups") or {}).values()]


def _weights_of_transformers(config: Any, quantization: dict[str, Any]) -> dict[str, Fp8Weight]:
    model = _empty_model(config)
    FineGrainedFP8HfQuantizer(FineGrainedFP8Config.from_dict(quantization)).preprocess_model(model)
    weights = dict(model.named_parameters())
    return {
        name: Fp8Weight(
            weight.shape,
            sum(part.nbytes for other, part in weights.items() if other in (name, f"{name}_scale_inv")),
            style_of_parameter(name, model.tp_plan),
        )
        for name, weight in weights.items()
        if f"{name}_scale_inv" in weights
    }


def _weights_of_compressed_tensors(config: Any, quantization: dict[str, Any]) -> dict[str, Fp8Weight]:
    groups = schemes(quantization)
    if len(groups) != 1 or not _is_fp8(groups[0], quantization.get("format")):
        return {}
    model = _empty_model(config)
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        return {}  # transformers keeps no experts in FP8
    targets, ignored = groups[0].get("targets") or (), quantization.get("ignore") or ()
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and _matches(name, module, targets)
        and not _matches(name, module, ignored)
    }
    if model.get_output_embeddings() in found.values():  # transformers would load it without its scale
        return {}
    return {
        f"{name}.weight": Fp8Weight(
            module.weight.shape,
            module.weight.numel() + SCALE_BYTES * module.out_features,
            style_of_parameter(f"{name}.weight", model.tp_plan),
        )
        for name, module in found.items()
    }


def _empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _is_fp8(scheme: Mapping[str, Any], file_format: str | None) -> bool:
    """Whether weights and inputs of a scheme of compressed-tensors are in FP8."""
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations") or {}
    types = {(args.get("type"), args.get("num_bits")) for args in (weights, inputs)}
    is_float = (scheme.get("format") or file_format) == "float-quantized"
    return is_float and types == {("float", 8)} and weights.get("strategy") in FP8_STRATEGIES


def _matches(name: str, module: nn.Module, patterns: Any) -> bool:
    """Whether a pattern of compressed-tensors names the module: by class, name or regular expression."""
    return any(
        pattern in (name, type(module).__name__)
        or (pattern.startswith("re:") and re.match(pattern.removeprefix("re:"), name))
        for pattern in patterns
    )
