"""Request for a Draft to a drafter in this process."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.decoding.grammar import Matcher
from outrider.decoding.settings import Sampling


class Text(Protocol):
    """Generation under way, known by its identity. Its ``tokens`` are committed and only grow."""

    prompt_length: int
    noise_key: int
    sampling: Sampling
    tokens: list[int]

    @property
    def matcher(self) -> Matcher | None:
        """Matcher of its grammar, if that is compiled."""


@dataclass(frozen=True)
class Asked:
    """Request for a chain of at most ``depth`` tokens after the text, and for alternatives."""

    text: Text
    depth: int
    alternatives: int = 0
    round: int = 0
    hidden: Tensor | None = (
        None  # [num_layers, hidden_size] states of the target from which it chose the newest token
    )
