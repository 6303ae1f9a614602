"""Training of a draft model that drafts token by token: it learns to say what the target would say.

Its guess depends on the text before it alone, so nothing has to be unrolled.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workshop.extra import require
from workshop.training.draft import load_draft, save_draft
from workshop.training.settings import ModelTrainingSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee

SCALE = 2  # scale of the adapters' output / their rank: the usual value


class ModelTrainee(Trainee):
    """Draft model: all of its weights are trained, or adapters."""

    title = "A draft model"

    def __init__(self, settings: ModelTrainingSettings, target: FrozenTarget) -> None:
        """Raises ValueError if the draft cannot be trained, or peft is missing."""
        self._draft = settings.draft
        self._vocabulary = target.config.vocab_size
        self._has_adapters = settings.lora is not None
        model = load_draft(settings.draft)
        self.network: Any = model if settings.lora is None else _with_adapters(model, settings.lora)

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        places = torch.arange(reading.tokens.shape[1], device=reading.tokens.device)
        logits = self.network(input_ids=reading.tokens, use_cache=False).logits
        # Larger models of a family often have rows for tokens that do not exist.
        yield PositionGuess(logits[..., : self._vocabulary].float(), places)

    def finalize(self) -> None:
        if self._has_adapters:
            self.network, self._has_adapters = self.network.merge_and_unload(), False
        super().finalize()

    def save(self, folder: Path) -> None:
        """Writes an ordinary checkpoint."""
        self.finalize()
        save_draft(self.network, self._draft, folder)


def _with_adapters(model: Any, rank: int) -> Any:
    """Raises ValueError if peft is missing."""
    require("peft", f"lora={rank}")
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
