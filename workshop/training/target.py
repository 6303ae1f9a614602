"""The target as training reads it: frozen, whole texts at once."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Reading:
    """What the target made of a batch of text."""

    tokens: Tensor  # int64 [rows, length]
    probs: Tensor  # float32 [rows, length, vocab_size], of the token after each
    hidden: Tensor  # float32 [rows, length, num_layers, hidden_size], of the layers asked for


class FrozenTarget:
    """A checkpoint. Nothing of it is trained."""

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        """In float32 on a CPU, in the checkpoint's own type elsewhere."""
        dtype = torch.float32 if device.type == "cpu" else "auto"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.device = device
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

    def measuring(self) -> AbstractContextManager[Any]:
        """In which a drafter guesses as it will when it drafts: on a CPU without rounding its products."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type != "cpu")

    @torch.no_grad()
    def read(self, tokens: Tensor, layers: tuple[int, ...]) -> Reading:
        """layers: by their inputs, as drafters beside the target count them; -1 is the last state, normed."""
        with torch.autocast(self.device.type, torch.bfloat16):
            output = self.model(input_ids=tokens, use_cache=False, output_hidden_states=bool(layers))
        hidden = [output.hidden_states[layer].float() for layer in layers]
        stacked = torch.stack(hidden, dim=2) if hidden else tokens.new_empty(*tokens.shape, 0, 0).float()
        return Reading(tokens, output.logits.float().softmax(-1), stacked)
