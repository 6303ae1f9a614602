"""Tokens of Drafts that a device makes without the host, as the host reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from outrider.engine.choosing.choosing_rows import ChoosingRows
from outrider.engine.choosing.sampler import Choices, RowNumbers, allowed_ones
from outrider.engine.device_time import Mark

_NOT_TOLD = np.empty((1, 0), np.float32)  # perturbed logits stay on the device


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens of a step that drafts several positions on a device, while they are copied to the host."""

    rows: ChoosingRows  # the choosing row of each piece of work, at the first position
    counts: Sequence[int]  # number of tokens that each piece of work feeds at the first position
    reached: Sequence[int]  # number of drafted positions of each piece of work
    logits: torch.Tensor  # [num_rows, vocab_size] of the first position
    arriving: torch.Tensor  # int32 [positions, rows, ranks + 1] DraftChains.found
    arrival: Mark

    def read(self) -> tuple[list[Choices], list[bool]]:
        """Returns as ``Choosing.read`` does. A row is not valid if its cached numbers are not finite."""
        are_all_valid = bool(self.arriving[0, : len(self.counts), -1].all())
        numbers, choices = RowNumbers(self.logits, _NOT_TOLD, are_all_valid), list[Choices]()
        by_row = self.arriving[:, : len(self.counts)].transpose(0, 1).tolist()
        pairs = zip(self.reached, by_row, strict=True)
        for place, (reached, ((*best, is_valid), *positions)) in enumerate(pairs):
            known = takewhile(lambda found: found[-1], positions[: reached - 1])
            further, first = [tuple(tokens) for *tokens, _ in known], tuple(best)
            if contexts := self.rows.special.get(place):
                first = allowed_ones(contexts[0], first)
            row, are_valid = slice(place, place + 1), [bool(is_valid)]
            choices.append(
                Choices(numbers, row, best[:1], are_valid, given_top_tokens=[first], further=further)
            )
        return choices, [True] * sum(self.counts)
