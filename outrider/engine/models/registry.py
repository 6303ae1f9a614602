"""Architectures that the fast decoder computes. Any other model runs through transformers' own layers."""

from typing import Any

from outrider.engine.models.architecture import Architecture
from outrider.engine.models.glm4_moe import GLM4_MOE
from outrider.engine.models.gpt_oss import GPT_OSS
from outrider.engine.models.llama import LLAMA
from outrider.engine.models.minimax_m2 import MINIMAX_M2
from outrider.engine.models.mistral import MISTRAL
from outrider.engine.models.mixtral import MIXTRAL
from outrider.engine.models.qwen2 import QWEN2
from outrider.engine.models.qwen3 import QWEN3
from outrider.engine.models.qwen_moe import QWEN2_MOE, QWEN3_MOE

_ROWS: dict[str, Architecture] = {}


def register(*rows: Architecture) -> None:
    """Adds architectures. Raises ValueError if a model has one already."""
    for row in rows:
        if row.model in _ROWS:
            raise ValueError(f"there is an architecture of {row.model} already")
        _ROWS[row.model] = row


def architecture_of(model: Any) -> Architecture | None:
    """Returns the row of a model's class; None if it has none."""
    return _ROWS.get(type(model).__name__)


def joined_products(model: Any) -> tuple[tuple[str, ...], ...]:
    """Returns names of linear layers that share an input; without a row the names that most models use."""
    return (architecture_of(model) or LLAMA).joined


register(LLAMA, MISTRAL, QWEN2, QWEN3)
register(MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, MINIMAX_M2, GPT_OSS)
