"""Output of a forward pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ForwardOutput:
    """Result of a pass."""

    logits: torch.Tensor  # [num_logits, vocab_size]; ranks other than 0 have their share of the vocabulary
    hidden: torch.Tensor | None  # [num_tokens, num_layers, hidden_size] of the wanted layers
    # bool [num_tokens], whether all keys and values of a token are finite, at all ranks
    are_finite: torch.Tensor
    # int32 [1] experts that the pass read in all layers; the next pass overwrites it. None: not counted.
    experts_read: torch.Tensor | None = None

    def like(self) -> "ForwardOutput":
        """Returns memory for another output of the same size."""
        hidden = None if self.hidden is None else torch.empty_like(self.hidden)
        logits, are_finite = torch.empty_like(self.logits), torch.empty_like(self.are_finite)
        return ForwardOutput(logits, hidden, are_finite, self.experts_read)

    def with_own_states(self) -> "ForwardOutput":
        """Returns the output with a copy of the states."""
        return self if self.hidden is None else replace(self, hidden=self.hidden.clone())

    def take(self, other: "ForwardOutput") -> None:
        """Copies an output of at most this size into the leading rows."""
        self.logits[: len(other.logits)].copy_(other.logits)
        self.are_finite[: len(other.are_finite)].copy_(other.are_finite)
        if self.hidden is not None and other.hidden is not None:
            self.hidden[: len(other.hidden)].copy_(other.hidden)


def joined(outputs: Iterable[ForwardOutput]) -> ForwardOutput:
    """Concatenates outputs of passes. Each is copied before the next pass overwrites its memory."""
    logits, hidden, are_finite, read = [], [], [], []
    for output in outputs:
        logits.append(output.logits.clone())
        are_finite.append(output.are_finite.clone())
        if output.hidden is not None:
            hidden.append(output.hidden.clone())
        if output.experts_read is not None:
            read.append(output.experts_read.clone())
    # Outputs without logits may differ in width, so they are left out.
    some = [part for part in logits if len(part)] or logits[:1]
    return ForwardOutput(
        torch.cat(some),
        torch.cat(hidden) if hidden else None,
        torch.cat(are_finite),
        torch.stack(read).sum(0, dtype=torch.int32) if read else None,
    )


def states_of(hidden_states: Sequence[torch.Tensor], layers: Sequence[int]) -> torch.Tensor | None:
    """Returns states [num_tokens, num_layers, hidden_size]; None if no layers are wanted.

    hidden_states: transformers' states of each layer, [1, num_tokens, hidden_size].
    """
    return torch.stack([hidden_states[layer][0] for layer in layers], dim=1) if layers else None
