"""Random LoRA adapters in PEFT's format, and checkpoints with merged adapters."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS = "adapter_model.safetensors"


def write_adapter(
    folder: Path,
    model: Path,
    seed: int,
    *,
    layers: tuple[str, ...] = LAYERS,
    rank: int = 4,
    strength: float = 0.2,
    **config: Any,
) -> Path:
    """Writes an adapter for a model's layers. config: further fields of adapter_config.json."""
    folder.mkdir(parents=True)
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [*layers],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in layers and ".experts." not in name:
            outputs, inputs = weight.shape
            before = f"base_model.model.{layer}.lora_"
            tensors[f"{before}A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            expand = torch.randn(outputs, rank, generator=generator) / rank**0.5
            tensors[f"{before}B.weight"] = strength * expand
    save_file(tensors, folder / WEIGHTS)
    return folder


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Returns a copy of the model whose weights are W + scale * B A, by PEFT's formula."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    weights, changes = load_file(model / "model.safetensors"), load_file(adapter / WEIGHTS)
    for name, shrink in changes.items():
        if match := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name):
            layer = f"{match[1]}.weight"
            change = scale * (changes[name.replace("lora_A", "lora_B")] @ shrink)
            weights[layer] = (weights[layer].float() + change).to(weights[layer].dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
