"""Acceptance on held-out prompts, as in serving with coupled verification.

The target has answered the prompts under keyed noise. A guess is correct if it equals the target's token. So
only the drafter has to run over the answers; a head reads the target's hidden states of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.decoding.noise import gumbel
from workshop.advice.answers import UNLABELLED
from workshop.advice.judged import FIRST
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import Trainee


@dataclass(frozen=True)
class HeldOutText:
    """Answer of the target to a held-out prompt."""

    tokens: tuple[int, ...]  # tokens of prompt and answer
    prompt_length: int
    noise_key: int
    temperature: float
    task: str = UNLABELLED


@dataclass
class AcceptanceTally:
    """Counts of guesses by position, over Drafts that begin at every token of the answers."""

    texts: int = 0
    reached: list[int] = field(default_factory=list)  # [depth] guesses whose predecessors were all correct
    accepted: list[int] = field(default_factory=list)

    def count(self, position: int, reached: int, accepted: int) -> None:
        """Adds counts of one position in some texts."""
        while len(self.reached) <= position:
            self.reached.append(0)
            self.accepted.append(0)
        self.reached[position] += reached
        self.accepted[position] += accepted

    @property
    def rates(self) -> list[float]:
        """Acceptance rate by position [depth]: accepted / reached; 0 if no Draft reached the position."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else 0.0 for accepted, reached in pairs]


class CoupledAcceptance:
    """Acceptance rate, by which the training of any drafter is judged."""

    title = "acceptance"

    def __init__(self, texts: Sequence[HeldOutText], length: int, depth: int) -> None:
        """Keeps the texts.

        length: most tokens of a text that are read, counted from its end.
        """
        self._texts, self._length, self._depth = texts, length, depth

    def measure(self, trainee: Trainee, target: FrozenTarget) -> list[float]:
        total = AcceptanceTally()
        for tally in self.by_task(trainee, target).values():
            for position, counts in enumerate(zip(tally.reached, tally.accepted, strict=True)):
                total.count(position, *counts)
        return total.rates

    @torch.no_grad()
    def by_task(self, trainee: Trainee, target: FrozenTarget) -> dict[str, AcceptanceTally]:
        """Returns tallies by task, in the order of their first texts."""
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
        # a draft model reads no states of the target
        nothing = tokens.new_empty(0)
        layers = trainee.hidden_layers
        reading = target.read(tokens, layers) if layers else Reading(tokens, nothing, nothing)
        alive: Tensor | None = None  # bool [num_chains]: all guesses so far were correct
        with target.measuring():
            for position, guess in enumerate(trainee.guesses(reading, self._depth, None)):
                places = guess.places + 1  # positions of the guessed tokens
                begins = places - position + cut >= text.prompt_length + FIRST
                counts = begins & (places < tokens.shape[1] - 1)  # the last token is the target's own
                said = tokens[0, places.clamp(max=tokens.shape[1] - 1)]
                correct = _chosen(guess.logits[0], text, (places + cut).tolist()) == said
                alive = counts if alive is None else alive & counts
                reached = int(alive.sum())
                alive = alive & correct
                tally.count(position, reached, int(alive.sum()))


def _chosen(logits: Tensor, text: HeldOutText, positions: list[int]) -> Tensor:
    """Returns a drafter's guesses under keyed noise, int64 [num_positions].

    logits: [num_positions, vocab_size].
    """
    if text.temperature > 0:
        keys = [text.noise_key] * len(positions)
        noise = gumbel(keys, positions, logits.shape[-1], logits.device)
        logits = logits / text.temperature + noise
    return logits.argmax(-1)
