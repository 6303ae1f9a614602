"""Training of exits: from the target's state after some layers straight to its own head.

An exit's guess depends on that state alone, which is the same while drafting and while verifying. So nothing
has to be unrolled.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

from outrider.engine.drafters.trained_exits import Exit
from outrider.engine.forward.part import last_norm_of
from workshop.training.settings import EarlyExitSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee


class EarlyExitTrainee(Trainee):
    """One exit after each of some layers; at first the target's own norm."""

    title = "Exits"

    def __init__(self, settings: EarlyExitSettings, target: FrozenTarget) -> None:
        """Raises ValueError if the target does not have these layers."""
        self._target = target
        count = target.config.num_hidden_layers
        self.hidden_layers = settings.exits or tuple(range(1, count))
        if max(self.hidden_layers) >= count:
            raise ValueError(f"exits={[*self.hidden_layers]} must be below {count}, the target's layers")
        exits = {str(number): Exit.of(target.config) for number in self.hidden_layers}
        last = last_norm_of(target.model).get_parameter("weight")
        for early_exit in exits.values():
            nn.init.eye_(early_exit.linear.weight)
            early_exit.norm.get_parameter("weight").data.copy_(last)
        self.network: nn.ModuleDict = nn.ModuleDict(exits)

    def labels(self, count: int) -> list[str]:
        return [f"after layer {number}" for number in self.hidden_layers]

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        """Yields one guess for each exit, whatever the depth: an exit is as good at every position."""
        places = torch.arange(reading.tokens.shape[1], device=reading.tokens.device)
        for index, early_exit in enumerate(self.network.values()):
            normed = early_exit(reading.hidden[:, :, index])
            yield PositionGuess(linear(normed, self._target.projection).float(), places)

    def save(self, folder: Path) -> None:
        """Writes exits as the engine reads them: outrider/engine/drafters/trained_exits.py."""
        tensors = {f"exits.{name}": value.bfloat16() for name, value in self.network.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {"architectures": ["EarlyExit"], "hidden_size": self._target.config.hidden_size}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
