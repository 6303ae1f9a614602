"""A forward pass of a worker, as its replies report it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSize:
    """Work of a forward pass."""

    sequences: float
    tokens: float  # decoded and drafted tokens
    prompt_tokens: float = 0.0  # tokens of prompts that the same pass prefills
    context_tokens: float = 0.0  # total cached tokens to which its sequences attend


@dataclass(frozen=True)
class Step:
    """One forward pass, as each of its sequences reports it."""

    number: int  # running number of the worker's passes
    size: StepSize
    seconds: float  # from building the batch to token ids on the host
    experts_read: float = 0.0  # share of a mixture's experts that it read; 0: no mixture, or not counted
    is_early: bool = False  # whether it was launched before the host knew the previous step's tokens
