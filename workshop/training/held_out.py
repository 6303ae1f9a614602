"""Measures of a drafter under training on held-out text."""

from typing import Protocol

import torch

from workshop.training.losses import distance
from workshop.training.settings import TrainingSettings
from workshop.training.stream import Stream
from workshop.training.target import FrozenTarget
from workshop.training.trainee import Trainee

MEASURED_ROWS = 16  # windows of held-out text


class HeldOut(Protocol):
    """Measure that a training is judged by."""

    title: str  # name of the measure

    def measure(self, trainee: Trainee, target: FrozenTarget) -> list[float]:
        """Returns the measure by position of a Draft [depth], each from 0 to 1."""
        ...


class SumOfMinima:
    """Sum of minima: the part of guesses that no rule could refuse, by position."""

    title = "sum of minima"

    def __init__(self, text: Stream, settings: TrainingSettings) -> None:
        self._text, self._settings = text, settings

    @torch.no_grad()
    def measure(self, trainee: Trainee, target: FrozenTarget) -> list[float]:
        settings = self._settings
        generator = torch.Generator().manual_seed(settings.seed)
        length = min(settings.length, len(self._text.tokens))
        tokens = self._text.windows(MEASURED_ROWS, length, generator).to(target.device)
        reading = target.read(tokens, trainee.hidden_layers)
        acceptance = []
        with target.measuring():
            for guess in trainee.guesses(reading, settings.depth, None):
                found = distance(reading.probs[:, guess.places], guess.logits)
                acceptance.append(1 - found.total_variation.mean().item())
        return acceptance
