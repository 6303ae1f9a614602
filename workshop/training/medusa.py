"""Training of Medusa heads: a residual layer for each position, before the target's own projection."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, silu

from workshop.training.settings import TrainingSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee


class MedusaTrainee(Trainee):
    """A head for each trained position. At first each says what the target says."""

    title = "Medusa heads"
    hidden_layers = (-1,)

    def __init__(self, settings: TrainingSettings, target: FrozenTarget) -> None:
        self._target, self._vocabulary = target, target.config.vocab_size
        size = target.config.hidden_size
        self.network: nn.ModuleList = nn.ModuleList(nn.Linear(size, size) for _ in range(settings.depth))
        for weight in self.network.parameters():
            nn.init.zeros_(weight)

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        count = reading.tokens.shape[1] - depth
        starts = torch.arange(count, device=reading.tokens.device)
        states = reading.hidden[:, :count, 0]
        for position, layer in enumerate(self.network):
            logits = linear(states + silu(layer(states)), self._target.projection)
            yield PositionGuess(logits.float(), starts + position + 1)

    def save(self, folder: Path) -> None:
        """Writes the heads under their authors' names, without a projection."""
        tensors = {}
        for head, layer in enumerate(self.network):
            for part, tensor in layer.state_dict().items():
                tensors[f"{head}.0.linear.{part}"] = tensor.bfloat16().contiguous()
        save_file(tensors, folder / "medusa_lm_head.safetensors", {"format": "pt"})
        config = {
            "medusa_num_heads": len(self.network),
            "medusa_num_layers": 1,
            "vocab_size": self._vocabulary,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
