"""Acceptance on held-out prompts, as the service would have it under coupled verification.

The target has answered them under keyed noise. A guess is right where it is what the target said, so the
drafter alone has to be run along the answers, and a head along the states that the target has of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.decoding.noise import gumbel
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import Trainee

FIRST = 1  # token of an answer that is drafted first: the one before it comes with the prompt's pass
UNLABELLED = "all"


@dataclass(frozen=True)
class HeldOutText:
    """What the target said to a prompt."""

    tokens: tuple[int, ...]  # prompt and answer
    prompt_length: int
    noise_key: int
    temperature: float
    task: str = UNLABELLED


@dataclass
class AcceptanceTally:
    """Guesses by position of a Draft, of Drafts that begin all over the answers."""

    texts: int = 0
    verified: list[int] = field(default_factory=list)  # where all positions before were right
    accepted: list[int] = field(default_factory=list)

    def count(self, position: int, verified: int, accepted: int) -> None:
        """Of one position in some texts."""
        while len(self.verified) <= position:
            self.verified.append(0)
            self.accepted.append(0)
        self.verified[position] += verified
        self.accepted[position] += accepted

    @property
    def rates(self) -> list[float]:
        """[depth] accepted / verified; 0 where no Draft came so far."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return [accepted / verified if verified else 0.0 for accepted, verified in pairs]


class CoupledAcceptance:
    """What a training of any drafter is judged by."""

    title = "acceptance"

    def __init__(self, texts: Sequence[HeldOutText], length: int, depth: int) -> None:
        """length: of a longer text only so many last tokens are read."""
        self._texts, self._length, self._depth = texts, length, depth

    def measure(self, trainee: Trainee, target: FrozenTarget) -> list[float]:
        total = AcceptanceTally()
        for tally in self.by_task(trainee, target).values():
            for position, counts in enumerate(zip(tally.verified, tally.accepted, strict=True)):
                total.count(position, *counts)
        return total.rates

    @torch.no_grad()
    def by_task(self, trainee: Trainee, target: FrozenTarget) -> dict[str, AcceptanceTally]:
        """In the order of their first texts."""
        tallies: dict[str, AcceptanceTally] = {}
        for text in self._texts:
            tally = tallies.setdefault(text.task, AcceptanceTally())
            tally.texts += 1
            self._count(text, trainee, target, tally)
        return tallies

    def _count(
        self, text: HeldOutText, trainee: Trainee, target: FrozenTarget, tally: AcceptanceTally
    ) -> None:
        tokens = torch.tensor([text.tokens[-self._length :]], device=target.device)
        cut = len(text.tokens) - tokens.shape[1]
        # A draft model needs nothing of the target here.
        nothing = tokens.new_empty(0)
        layers = trainee.hidden_layers
        reading = target.read(tokens, layers) if layers else Reading(tokens, nothing, nothing)
        reached: Tensor | None = None
        with target.measuring():
            for position, guess in enumerate(trainee.guesses(reading, self._depth, None)):
                places = guess.places + 1  # of the tokens that are guessed
                begins = places - position + cut >= text.prompt_length + FIRST
                counts = begins & (places < tokens.shape[1] - 1)  # the last token is the target's own
                said = tokens[0, places.clamp(max=tokens.shape[1] - 1)]
                right = _chosen(guess.logits[0], text, (places + cut).tolist()) == said
                reached = counts if reached is None else reached & counts
                verified = int(reached.sum())
                reached = reached & right
                tally.count(position, verified, int(reached.sum()))


def _chosen(logits: Tensor, text: HeldOutText, positions: list[int]) -> Tensor:
    """What a drafter with these logits [num_positions, vocab_size] guesses, int64 [num_positions]"""
    if text.temperature > 0:
        keys = [text.noise_key] * len(positions)
        noise = gumbel(keys, positions, logits.shape[-1], logits.device)
        logits = logits / text.temperature + noise
    return logits.argmax(-1)
