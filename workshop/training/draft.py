"""Checkpoint of a draft model: reading it for training, and writing it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.loading.stored_checkpoint import is_quantized

BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def load_draft(folder: Path, **options: Any) -> Any:
    """Loads a model of transformers, in float32.

    options: of ``from_pretrained``.

    Raises:
        ValueError: its weights are quantized.
    """
    if is_quantized(AutoConfig.from_pretrained(folder)):
        raise ValueError(
            f"draft={str(folder)!r} is quantized: name the checkpoint it was made from, and quantize what "
            "comes out"
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def save_draft(model: Any, draft: Path, folder: Path) -> None:
    """Writes the model in bfloat16, which its weights then have too.

    draft: the checkpoint that it began with, whose tokenizer it keeps.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in BESIDE_WEIGHTS:
        if (draft / name).exists():
            shutil.copy(draft / name, folder / name)
