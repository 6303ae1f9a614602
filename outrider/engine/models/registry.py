"""Registry of the architectures that the fast decoder supports; other models run in transformers' layers."""

from collections.abc import Iterator
from typing import Any

from outrider.engine.models.architecture import Architecture, Mixture
from outrider.engine.models.glm4_moe import GLM4_MOE
from outrider.engine.models.gpt_oss import GPT_OSS
from outrider.engine.models.llama import LLAMA
from outrider.engine.models.minimax_m2 import MINIMAX_M2
from outrider.engine.models.mistral import MISTRAL
from outrider.engine.models.mixtral import MIXTRAL
from outrider.engine.models.mixture_blocks import MIXTURE_BLOCKS
from outrider.engine.models.qwen2 import QWEN2
from outrider.engine.models.qwen3 import QWEN3
from outrider.engine.models.qwen_moe import QWEN2_MOE, QWEN3_MOE

_ROWS: dict[str, Architecture] = {}


def register(*rows: Architecture) -> None:
    """Adds architectures. Raises ValueError if a model has an architecture already."""
    for row in rows:
        if row.model in _ROWS:
            raise ValueError(f"there is an architecture of {row.model} already")
        _ROWS[row.model] = row


def architecture_of(model: Any) -> Architecture | None:
    """Returns the architecture of a model's class; None if the registry has none."""
    return _ROWS.get(type(model).__name__)


def mixtures_in(model: Any) -> Iterator[tuple[str, Any, Mixture]]:
    """Yields the path, the module and the description of each described mixture of experts of a model."""
    architecture = architecture_of(model)
    if architecture is None:
        for path, module in model.named_modules():
            if mixture := MIXTURE_BLOCKS.get(type(module).__name__):
                yield path, module, mixture
    elif architecture.mixture is not None:
        for number, layer in enumerate(model.get_submodule(architecture.layers)):
            mlp = layer.get_submodule(architecture.mlp)
            if hasattr(mlp, architecture.mixture.experts):
                yield f"{architecture.layers}.{number}.{architecture.mlp}", mlp, architecture.mixture


def joined_products(model: Any) -> tuple[tuple[str, ...], ...]:
    """Returns names of linear layers that share an input; Llama's names if the model is not registered."""
    return (architecture_of(model) or LLAMA).joined


register(LLAMA, MISTRAL, QWEN2, QWEN3)
register(MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, MINIMAX_M2, GPT_OSS)
