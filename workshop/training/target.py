"""The target as training reads it: frozen, whole texts at once."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
LAYER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


@dataclass(frozen=True)
class Reading:
    """Batch of text, with the target's distributions and states."""

    tokens: Tensor  # int64 [rows, length]
    probs: Tensor  # float32 [rows, length, vocab_size], distribution of the next token
    hidden: Tensor  # float32 [rows, length, num_layers, hidden_size], inputs of the requested layers


class FrozenTarget:
    """Checkpoint of a target, whose weights are not trained."""

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        """Loads in float32 on a CPU, in the checkpoint's own type elsewhere."""
        dtype = torch.float32 if device.type == "cpu" else "auto"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.device = device
        self.config: Any = model.config.get_text_config()

    @property
    def embedding(self) -> Tensor:
        """Embedding of tokens: [vocab_size, hidden_size]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def projection(self) -> Tensor:
        """Projection of last states to logits: [vocab_size, hidden_size]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def usual_layers(self) -> tuple[int, ...]:
        """Layers whose inputs a head reads if none are named: 2, n / 2 and n - 3 of n, as in EAGLE-3."""
        count = self.config.num_hidden_layers
        return 2, count // 2, count - 3

    def layer_sizes(self, intermediate_size: int | None) -> dict[str, Any]:
        """Returns fields of a config whose decoder layers are as wide as the target's.

        intermediate_size: width of their feed-forward networks; None: the target's.
        """
        sizes = {name: getattr(self.config, name) for name in LAYER_SIZES}
        return sizes if intermediate_size is None else {**sizes, "intermediate_size": intermediate_size}

    def measuring(self) -> AbstractContextManager[Any]:
        """Returns a context in which a drafter guesses as when it drafts: no rounded products on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type != "cpu")

    def training(self) -> AbstractContextManager[Any]:
        """Returns a context of products in bfloat16, unless a CPU has to emulate them, which takes longer."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=has_bfloat16(self.device))

    @torch.no_grad()
    def read(self, tokens: Tensor, layers: tuple[int, ...]) -> Reading:
        """Reads a batch of text.

        layers: numbers as target drafters count them, by inputs; -1: the last state, normed.
        """
        with self.training():
            output = self.model(input_ids=tokens, use_cache=False, output_hidden_states=bool(layers))
        hidden = [output.hidden_states[layer].float() for layer in layers]
        stacked = torch.stack(hidden, dim=2) if hidden else tokens.new_empty(*tokens.shape, 0, 0).float()
        return Reading(tokens, output.logits.float().softmax(-1), stacked)


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether the device has instructions for products in bfloat16."""
    if device.type != "cpu":
        return True
    return any(has_it for name, has_it in torch.cpu.get_capabilities().items() if "bf16" in name)
