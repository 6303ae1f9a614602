"""Request for a Draft to a drafter in this process."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.decoding.grammar import Matcher
from outrider.decoding.settings import Sampling
from outrider.engine.sequence import EngineSequence


class DraftedSequence(Protocol):
    """Sequence that a drafter in this process drafts for. Its ``tokens`` are committed and only grow."""

    prompt_length: int
    noise_key: int
    sampling: Sampling
    tokens: list[int]

    @property
    def matcher(self) -> Matcher | None:
        """Matcher of its grammar; None: no grammar, or not compiled yet."""


@dataclass(frozen=True)
class DraftRequest:
    """Request for a chain of at most ``depth`` tokens after the sequence, and for alternatives."""

    sequence: DraftedSequence
    depth: int
    alternatives: int = 0
    round: int = 0
    # [num_layers, hidden_size] states of the target from which it chose the newest token.
    hidden: Tensor | None = None
    least_survival: float = 0.0  # least probability of acceptance at which a node pays

    @property
    def engine_sequence(self) -> EngineSequence:
        """Returns the engine's sequence, which has a cache; only a request of an engine has it."""
        assert isinstance(self.sequence, EngineSequence)
        return self.sequence
