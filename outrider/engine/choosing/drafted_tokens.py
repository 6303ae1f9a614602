"""Drafts that a device makes by itself, as the host reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from outrider.decoding.choice_context import ChoiceContext
from outrider.engine.choosing.sampler import Choices, allowed_ones
from outrider.engine.device_time import Mark

_NOT_TOLD = np.empty((1, 0), np.float32)  # perturbed logits stay on the device


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens of a step that drafts several positions on a device, on their way to the host."""

    rows: Sequence[list[ChoiceContext]]  # the choosing row of each piece of work, at the first position
    counts: Sequence[int]  # tokens that each piece of work feeds at the first position
    reached: Sequence[int]  # positions of each piece of work
    logits: torch.Tensor  # [num_rows, vocab_size] of the first position
    arriving: torch.Tensor  # int32 [positions, rows, ranks + 1] DraftChains.found
    arrival: Mark

    def read(self) -> tuple[list[Choices], list[bool]]:
        """Returns what ``Choosing.read`` does; rows whose cache is not finite are not valid."""
        choices = []
        by_row = self.arriving[:, : len(self.rows)].transpose(0, 1).tolist()
        pairs = zip(self.rows, self.reached, by_row, strict=True)
        for place, (part, reached, ((*best, is_valid), *positions)) in enumerate(pairs):
            known = takewhile(lambda found: found[-1], positions[: reached - 1])
            further = [tuple(tokens) for *tokens, _ in known]
            first, logits = allowed_ones(part[0], tuple(best)), self.logits[place : place + 1]
            choices.append(Choices(part, logits, [first], _NOT_TOLD, [bool(is_valid)], further=further))
        return choices, [True] * sum(self.counts)
