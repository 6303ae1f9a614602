"""Context length of a model, and rotary embeddings that do not depend on the rest of the batch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

UNLIMITED = 1 << 30  # positions of a model that states no limit
LONG_ROPE = "longrope"


def context_length(model: Any) -> int:
    """Returns the most tokens of a sequence for which results do not depend on the rest of the batch."""
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), getattr(config, "attention_chunk_size", None)]
    return min((limit for limit in limits if limit is not None), default=UNLIMITED)


def context_because(model: Any) -> str | None:
    """Returns a sentence on a context length that users of transformers may not expect, else None."""
    config, length = model.config.get_text_config(), context_length(model)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk == length:
        stated = getattr(config, "max_position_embeddings", None)
        return (
            f"the context is {length} of {stated} tokens: beyond the first {chunk}, layers would attend"
            " within chunks, which our attention does not support"
        )
    kinds = {rope.get("rope_type") for rope in _ropes(getattr(config, "rope_parameters", None) or {})}
    if LONG_ROPE in kinds:
        return (
            f"the context is {length} tokens: positions are rotated by the long factors in texts of any"
            " length, so that cached keys stay what they are; transformers has short ones for short texts"
        )
    if "dynamic" in kinds:
        return (
            f"the context is {length} tokens: beyond it all positions would be rotated by the length of the"
            " longest text, so that cached keys would change"
        )
    return None


def fix_rotations(model: Any) -> None:
    """Makes a model with longrope always use its long factors, in place, if its context needs them.

    transformers chooses the factors by the longest text of the batch. Cached keys would become wrong, and a
    text would depend on its batch. vLLM uses the long factors as well.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == LONG_ROPE:
            module.rope_type = _fixed(module, None)
        elif isinstance(kinds, dict):
            for layers in [name for name, kind in kinds.items() if kind == LONG_ROPE]:
                kinds[layers] = _fixed(module, layers)


def _fixed(module: nn.Module, layers: str | None) -> str:
    """Sets the long frequencies; returns the rope type under which transformers leaves them unchanged."""
    config: Any = module.config
    parameters = config.rope_parameters if layers is None else config.rope_parameters[layers]
    original: int = parameters["original_max_position_embeddings"]
    if config.max_position_embeddings > original:
        frequencies: torch.Tensor = getattr(module, "inv_freq" if layers is None else f"{layers}_inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[LONG_ROPE](
            config, frequencies.device, seq_len=original + 1, layer_type=layers
        )
        frequencies.copy_(long)
    return "default"


def _ropes(parameters: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields a model's rotary settings: a single set, or a set per kind of layer."""
    return (
        [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    )
