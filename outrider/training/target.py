"""The target as training reads it: frozen, whole texts at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Reading:
    """What the target made of a batch of text."""

    tokens: Tensor  # int64 [rows, length]
    probs: Tensor  # float32 [rows, length, vocab_size], of the token after each
    hidden: Tensor  # float32 [rows, length, num_layers, hidden_size], of the layers asked for


class Target:
    """A checkpoint. Nothing of it is trained."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def projection(self) -> Tensor:
        """[vocab_size, hidden_size] that makes logits of its last states"""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def read(self, tokens: Tensor, layers: tuple[int, ...]) -> Reading:
        """layers: by their inputs, as drafters beside the target count them; -1 is the last state, normed."""
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(input_ids=tokens, use_cache=False, output_hidden_states=bool(layers))
        hidden = [output.hidden_states[layer].float() for layer in layers]
        stacked = torch.stack(hidden, dim=2) if hidden else tokens.new_empty(*tokens.shape, 0, 0).float()
        return Reading(tokens, output.logits.float().softmax(-1), stacked)
