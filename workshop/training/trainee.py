"""What is trained: a drafter's network, how it guesses, and how it is written down."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from workshop.training.target import Reading


@dataclass(frozen=True)
class PositionGuess:
    """Of one position of many Drafts."""

    logits: Tensor  # float32 [rows, num_chains, vocab_size]
    places: Tensor  # int64 [num_chains] of the tokens after which the target says the same


class Trainee(ABC):
    """A drafter under training, for one target."""

    title: str
    hidden_layers: tuple[int, ...] = ()  # of the target, by their inputs, that it reads
    network: nn.Module  # its weights: those that take gradients are trained

    @abstractmethod
    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        """Of each position in turn, from chains that start all over the text.

        generator: what is drawn while training; None: nothing is left out.
        """

    def depth(self, done: float, depth: int) -> int:
        """Positions that are trained now, of ``depth`` in the end. done: share of the steps."""
        return depth

    def labels(self, count: int) -> list[str]:
        """Of so many guesses, in their order."""
        return [f"position {index}" for index in range(1, count + 1)]

    def settle(self) -> None:
        """Takes the weights that it will have when they are stored, in bfloat16."""
        for weight in self.network.parameters():
            weight.data = weight.data.bfloat16().float()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Its checkpoint, as the engine and others read it."""

    @property
    def size(self) -> int:
        """Weights that are trained."""
        return sum(weight.numel() for weight in self.network.parameters() if weight.requires_grad)
