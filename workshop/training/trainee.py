"""Trainee: a drafter's network, its guesses, its checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from workshop.training.target import Reading


@dataclass(frozen=True)
class PositionGuess:
    """Guesses at one position of many Drafts."""

    logits: Tensor  # float32 [rows, num_chains, vocab_size]
    places: Tensor  # int64 [num_chains] positions whose next token is guessed
    # Whether each chain goes on from its guess before. Its loss then counts by how likely it is reached.
    continues_chain: bool = False


class Trainee(ABC):
    """Drafter under training, for one target."""

    title: str
    hidden_layers: tuple[int, ...] = ()  # layers of the target whose inputs it reads
    depths: tuple[tuple[float, int], ...] = ()  # shares of the steps, and the largest depth up to each share
    network: nn.Module  # network; weights that take gradients are trained

    @abstractmethod
    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        """Yields guesses of each position in turn, from chains that start all over the text.

        generator: what is drawn while training; None: nothing is left out.
        """

    def depth(self, done: float, depth: int) -> int:
        """Returns the number of trained positions. depth: number at the end. done: share of the steps."""
        return next((min(least, depth) for share, least in self.depths if done < share), depth)

    def labels(self, count: int) -> list[str]:
        """Returns names of guesses, in their order."""
        return [f"position {index}" for index in range(1, count + 1)]

    def finalize(self) -> None:
        """Rounds the weights to bfloat16, in which they are stored."""
        for weight in self.network.parameters():
            weight.data = weight.data.bfloat16().float()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes its checkpoint, as the engine and other servers read it."""

    @property
    def size(self) -> int:
        """Number of weights that are trained."""
        return sum(weight.numel() for weight in self.network.parameters() if weight.requires_grad)
