"""Training of a draft model that guesses several tokens in one pass.

Source: An et al., "PARD: accelerating LLM inference with low-cost parallel draft model adaptation", 2025.
At each position a part of the mask chains is dropped: deeper masks cost as much and teach less.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workshop.training.attention import ATTENTION
from workshop.training.chains import Chains
from workshop.training.draft import load_draft, save_draft
from workshop.training.settings import ParallelSettings
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee

MIN_KEPT = 0.2  # least share of chains at a position


class ParallelTrainee(Trainee):
    """Draft model that drafts token by token already, and learns to guess several tokens in one pass."""

    title = "A draft model that guesses several tokens in one pass"

    def __init__(self, settings: ParallelSettings, target: FrozenTarget) -> None:
        """Prepares the draft.

        Raises:
        Raises:
            ValueError: the draft's vocabulary is not the target's, or does not have the mask token.
        """
        self._settings = settings
        model = load_draft(settings.draft, attn_implementation=ATTENTION)
        vocabulary, found = target.config.vocab_size, model.config.vocab_size
        if found != vocabulary:
            raise ValueError(
                f"draft={str(settings.draft)!r} has {found} tokens and must have {vocabulary}, as the target"
            )
        if settings.mask_token >= vocabulary:
            raise ValueError(f"mask_token={settings.mask_token} must be below {vocabulary}")
        self.network: Any = model

    def guesses(
        self, reading: Reading, depth: int, generator: torch.Generator | None
    ) -> Iterator[PositionGuess]:
        rows, length = reading.tokens.shape
        starts = torch.arange(length - depth, device=reading.tokens.device)
        chains = Chains()
        yield PositionGuess(self._logits(reading.tokens[:, starts], starts, chains), starts)
        chains.start(starts)
        for position in range(1, depth):
            kept = self._kept(len(starts), position, length - depth, generator)
            chains.keep(kept)
            starts = starts[kept]
            masks = starts.new_full((rows, len(starts)), self._settings.mask_token)
            yield PositionGuess(self._logits(masks, starts + position, chains), starts + position)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, chains: Chains) -> torch.Tensor:
        output = self.network(
            input_ids=tokens, position_ids=positions[None], use_cache=False, outrider=chains
        )
        logits: torch.Tensor = output.logits.float()
        return logits

    def _kept(self, count: int, position: int, of: int, generator: torch.Generator | None) -> torch.Tensor:
        """Returns indices of the chains that reach a position: a share of all, which falls with it."""
        if generator is None:
            return torch.arange(count)
        wanted = max(1, round(of * max(self._settings.kept**position, MIN_KEPT)))
        return torch.randperm(count, generator=generator)[:wanted].sort().values

    def save(self, folder: Path) -> None:
        """Writes an ordinary checkpoint whose config names its mask token."""
        self.network.config.pard_token = self._settings.mask_token
        save_draft(self.network, self._settings.draft, folder)
