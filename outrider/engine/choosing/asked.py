"""A Draft that is asked of a drafter in this process."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.decoding.grammar import Matcher
from outrider.decoding.settings import Sampling


class Text(Protocol):
    """One generation under way, known by its identity: its ``tokens``, the committed ones, only ever grow."""

    prompt_length: int
    noise_key: int
    sampling: Sampling
    tokens: list[int]

    @property
    def matcher(self) -> Matcher | None:
        """Matcher of its grammar, if that is compiled."""


@dataclass(frozen=True)
class Asked:
    """A chain of at most ``depth`` tokens after those of the text, and ``leaves`` runners-up beside it."""

    text: Text
    depth: int
    alternatives: int = 0
    round: int = 0
    hidden: Tensor | None = None  # [num_layers, hidden_size] of the target, where it chose the newest token
